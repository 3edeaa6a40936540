from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
