from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_TYPE_UNSPECIFIED: _ClassVar[RequestType]
    REQUEST_TYPE_CONTEXT_ONLY: _ClassVar[RequestType]
    REQUEST_TYPE_GENERATION_ONLY: _ClassVar[RequestType]
    REQUEST_TYPE_CONTEXT_AND_GENERATION: _ClassVar[RequestType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT: _ClassVar[FinishReason]
REQUEST_TYPE_UNSPECIFIED: RequestType
REQUEST_TYPE_CONTEXT_ONLY: RequestType
REQUEST_TYPE_GENERATION_ONLY: RequestType
REQUEST_TYPE_CONTEXT_AND_GENERATION: RequestType
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_CONTEXT: FinishReason

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("external_id", "model", "text", "chat", "token_ids", "sampling", "request_type", "deadline_ms", "context_phase_params", "disagg_request_id")
    EXTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PHASE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DISAGG_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    external_id: str
    model: str
    text: str
    chat: ChatPrompt
    token_ids: bytes
    sampling: SamplingParams
    request_type: RequestType
    deadline_ms: int
    context_phase_params: SignedContextPhaseParams
    disagg_request_id: DisaggRequestId
    def __init__(self, external_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., request_type: _Optional[_Union[RequestType, str]] = ..., deadline_ms: _Optional[int] = ..., context_phase_params: _Optional[_Union[SignedContextPhaseParams, _Mapping]] = ..., disagg_request_id: _Optional[_Union[DisaggRequestId, _Mapping]] = ...) -> None: ...

class DisaggRequestId(_message.Message):
    __slots__ = ("router_epoch", "counter", "attempt")
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    router_epoch: int
    counter: int
    attempt: int
    def __init__(self, router_epoch: _Optional[int] = ..., counter: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class KvStats(_message.Message):
    __slots__ = ("transferred_tokens", "transferred_blocks", "transferred_bytes", "reused_tokens", "recomputed_tokens", "recompute_reason", "transport")
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transferred_tokens: int
    transferred_blocks: int
    transferred_bytes: int
    reused_tokens: int
    recomputed_tokens: int
    recompute_reason: str
    transport: str
    def __init__(self, transferred_tokens: _Optional[int] = ..., transferred_blocks: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., recompute_reason: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("scheduled_ms", "first_token_ms", "finished_ms", "transfer_ms")
    SCHEDULED_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    scheduled_ms: float
    first_token_ms: float
    finished_ms: float
    transfer_ms: float
    def __init__(self, scheduled_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., finished_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "kv", "context_timing", "generation_timing")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TIMING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TIMING_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    kv: KvStats
    context_timing: StageTimes
    generation_timing: StageTimes
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., kv: _Optional[_Union[KvStats, _Mapping]] = ..., context_timing: _Optional[_Union[StageTimes, _Mapping]] = ..., generation_timing: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("external_id", "token_index", "token_ids", "text", "text_offset", "finish", "context_phase_params", "seed")
    EXTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PHASE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    external_id: str
    token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    text_offset: int
    finish: Finish
    context_phase_params: SignedContextPhaseParams
    seed: int
    def __init__(self, external_id: _Optional[str] = ..., token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., text_offset: _Optional[int] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., context_phase_params: _Optional[_Union[SignedContextPhaseParams, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("dtype", "num_layers", "num_kv_heads", "head_dim", "tokens_per_block", "tp_size", "tp_rank", "pp_size", "pp_rank", "layout_version", "model_fingerprint")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    layout_version: int
    model_fingerprint: str
    def __init__(self, dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tokens_per_block: _Optional[int] = ..., tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., layout_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class ContextPhaseParams(_message.Message):
    __slots__ = ("first_token_ids", "disagg_request_id", "server_name", "incarnation", "rank_addresses", "transport", "layout", "num_prompt_tokens", "prompt_digest", "block_hashes", "lease_ms", "pull_token", "usage", "model", "serial", "seed", "timing", "first_text_length")
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DISAGG_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PULL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    FIRST_TEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    disagg_request_id: DisaggRequestId
    server_name: str
    incarnation: int
    rank_addresses: _containers.RepeatedScalarFieldContainer[bytes]
    transport: str
    layout: KvLayout
    num_prompt_tokens: int
    prompt_digest: bytes
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ms: int
    pull_token: bytes
    usage: Usage
    model: str
    serial: int
    seed: int
    timing: StageTimes
    first_text_length: int
    def __init__(self, first_token_ids: _Optional[_Iterable[int]] = ..., disagg_request_id: _Optional[_Union[DisaggRequestId, _Mapping]] = ..., server_name: _Optional[str] = ..., incarnation: _Optional[int] = ..., rank_addresses: _Optional[_Iterable[bytes]] = ..., transport: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., lease_ms: _Optional[int] = ..., pull_token: _Optional[bytes] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., model: _Optional[str] = ..., serial: _Optional[int] = ..., seed: _Optional[int] = ..., timing: _Optional[_Union[StageTimes, _Mapping]] = ..., first_text_length: _Optional[int] = ...) -> None: ...

class SignedContextPhaseParams(_message.Message):
    __slots__ = ("payload", "key_id", "signature")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    key_id: str
    signature: bytes
    def __init__(self, payload: _Optional[bytes] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("external_ids", "reason")
    EXTERNAL_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    external_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, external_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "unknown")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...
