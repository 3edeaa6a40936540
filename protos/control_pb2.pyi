from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SleepRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("path", "max_s")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_S_FIELD_NUMBER: _ClassVar[int]
    path: str
    max_s: float
    def __init__(self, path: _Optional[str] = ..., max_s: _Optional[float] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[TraceFile]
    def __init__(self, files: _Optional[_Iterable[_Union[TraceFile, _Mapping]]] = ...) -> None: ...

class TraceFile(_message.Message):
    __slots__ = ("path", "num_steps", "num_bytes", "recorded_s", "is_full")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDED_S_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_steps: int
    num_bytes: int
    recorded_s: float
    is_full: bool
    def __init__(self, path: _Optional[str] = ..., num_steps: _Optional[int] = ..., num_bytes: _Optional[int] = ..., recorded_s: _Optional[float] = ..., is_full: _Optional[bool] = ...) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("loras",)
    LORAS_FIELD_NUMBER: _ClassVar[int]
    loras: _containers.RepeatedCompositeFieldContainer[LoraAdapter]
    def __init__(self, loras: _Optional[_Iterable[_Union[LoraAdapter, _Mapping]]] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvEventBatch(_message.Message):
    __slots__ = ("snapshot", "events")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    snapshot: KvCacheSnapshot
    events: _containers.RepeatedCompositeFieldContainer[KvCacheEvent]
    def __init__(self, snapshot: _Optional[_Union[KvCacheSnapshot, _Mapping]] = ..., events: _Optional[_Iterable[_Union[KvCacheEvent, _Mapping]]] = ...) -> None: ...

class KvCacheSnapshot(_message.Message):
    __slots__ = ("sequence", "block_hashes", "tokens_per_block")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tokens_per_block: int
    def __init__(self, sequence: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., tokens_per_block: _Optional[int] = ...) -> None: ...

class KvCacheEvent(_message.Message):
    __slots__ = ("sequence", "stored", "removed", "cleared")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: KvCacheStored
    removed: KvCacheRemoved
    cleared: KvCacheCleared
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Union[KvCacheStored, _Mapping]] = ..., removed: _Optional[_Union[KvCacheRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvCacheStored(_message.Message):
    __slots__ = ("block_hashes", "parent_hash", "num_tokens")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_hash: bytes
    num_tokens: int
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_hash: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class KvCacheRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepStats(_message.Message):
    __slots__ = ("step_index", "step_ms", "num_queued", "num_running", "num_prefill_tokens", "num_decode_tokens", "num_finished", "blocks_free", "blocks_total")
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    step_index: int
    step_ms: float
    num_queued: int
    num_running: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_finished: int
    blocks_free: int
    blocks_total: int
    def __init__(self, step_index: _Optional[int] = ..., step_ms: _Optional[float] = ..., num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_finished: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_total: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("name", "role", "incarnation", "version", "model", "layout", "transport", "rank_addresses", "uptime_s", "state", "servers", "address", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    incarnation: int
    version: str
    model: str
    layout: _inference_pb2.KvLayout
    transport: str
    rank_addresses: _containers.RepeatedScalarFieldContainer[bytes]
    uptime_s: float
    state: str
    servers: _containers.RepeatedCompositeFieldContainer[ServerInfo]
    address: str
    detail: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_inference_pb2.KvLayout, _Mapping]] = ..., transport: _Optional[str] = ..., rank_addresses: _Optional[_Iterable[bytes]] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., servers: _Optional[_Iterable[_Union[ServerInfo, _Mapping]]] = ..., address: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "vocab_size", "max_prompt_tokens", "max_total_tokens", "eos_token_ids", "dtype", "num_parameters", "architecture")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    max_prompt_tokens: int
    max_total_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_parameters: int
    architecture: str
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_parameters: _Optional[int] = ..., architecture: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_queued", "num_running", "tokens_in_flight", "blocks_free", "blocks_total", "sequence")
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    num_running: int
    tokens_in_flight: int
    blocks_free: int
    blocks_total: int
    sequence: int
    def __init__(self, num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., tokens_in_flight: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_total: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("disagg_request_id", "pull_token")
    DISAGG_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PULL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    disagg_request_id: _inference_pb2.DisaggRequestId
    pull_token: bytes
    def __init__(self, disagg_request_id: _Optional[_Union[_inference_pb2.DisaggRequestId, _Mapping]] = ..., pull_token: _Optional[bytes] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("entries_by_state", "blocks_by_state", "blocks_by_owner", "holders", "counters", "servers")
    class EntriesByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BlocksByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BlocksByOwnerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENTRIES_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_OWNER_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    entries_by_state: _containers.ScalarMap[str, int]
    blocks_by_state: _containers.ScalarMap[str, int]
    blocks_by_owner: _containers.ScalarMap[str, int]
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    counters: _containers.ScalarMap[str, int]
    servers: _containers.RepeatedCompositeFieldContainer[ServerLedger]
    def __init__(self, entries_by_state: _Optional[_Mapping[str, int]] = ..., blocks_by_state: _Optional[_Mapping[str, int]] = ..., blocks_by_owner: _Optional[_Mapping[str, int]] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., servers: _Optional[_Iterable[_Union[ServerLedger, _Mapping]]] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("block", "holders")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    block: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, block: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class ServerLedger(_message.Message):
    __slots__ = ("name", "ledger", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    ledger: Ledger
    error: str
    def __init__(self, name: _Optional[str] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...
