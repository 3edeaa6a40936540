"""The plain, frozen types that travel inside Baton.

Protobuf messages live at the gRPC edge only; `protos.codec` turns them into
these and back. The same types cross the executor's queues (msgspec), so that
nothing is converted twice.
"""

from __future__ import annotations

import enum

import msgspec


class RequestType(enum.StrEnum):
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"
    CONTEXT_AND_GENERATION = "context_and_generation"


class FinishReason(enum.StrEnum):
    LENGTH = "length"
    STOP = "stop"
    CONTEXT = "context"
    """A context_only request ended as it should: its KV waits under a lease."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens`
    None means as many as the server's limits leave room for. `seed` None is
    replaced by a minted one by the first server that sees the request.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class DisaggRequestId(msgspec.Struct, frozen=True, order=True):
    """128-bit id of one hand-off attempt; a retry is a new attempt."""

    router_epoch: int
    counter: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.router_epoch:016x}-{self.counter:08x}-{self.attempt}"


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's share of the KV cache lies in memory.

    A block is one contiguous piece of
    `[num_layers, 2, num_kv_heads, tokens_per_block, head_dim]` elements.
    """

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    model_fingerprint: str
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    layout_version: int = 1

    @property
    def block_bytes(self) -> int:
        element_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return (
            self.num_layers
            * 2
            * self.num_kv_heads
            * self.tokens_per_block
            * self.head_dim
            * element_bytes
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.tokens_per_block)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """What crossed the data plane for one request."""

    transferred_tokens: int = 0
    transferred_blocks: int = 0
    transferred_bytes: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    recompute_reason: str = ""
    transport: str = ""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds since the server received the request; `transfer_ms` is a span."""

    scheduled_ms: float = 0.0
    first_token_ms: float = 0.0
    finished_ms: float = 0.0
    transfer_ms: float = 0.0


class ContextPhaseParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished context phase yields and a generation_only request carries."""

    first_token_ids: tuple[int, ...]
    disagg_request_id: DisaggRequestId
    server_name: str
    incarnation: int
    rank_addresses: tuple[bytes, ...]
    transport: str
    layout: KvLayout
    num_prompt_tokens: int
    prompt_digest: bytes
    block_hashes: tuple[bytes, ...]
    lease_ms: int
    pull_token: bytes
    usage: Usage
    model: str
    seed: int
    serial: int = 0
    timing: StageTimes = StageTimes()
    first_text_length: int = 0


class SignedContextPhaseParams(msgspec.Struct, frozen=True):
    """The exact bytes that were signed, so that peers of another version verify them too."""

    payload: bytes
    key_id: str
    signature: bytes


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None
    usage: Usage = Usage()
    kv: KvStats = KvStats()
    context_timing: StageTimes | None = None
    generation_timing: StageTimes | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. Exactly one of the three prompts is given."""

    external_id: str
    model: str = ""
    text: str | None = None
    chat: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION
    deadline_ms: int = 0
    context_phase_params: SignedContextPhaseParams | None = None
    disagg_request_id: DisaggRequestId | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed piece of an answer; the last one carries `finish`."""

    external_id: str
    token_index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_offset: int = 0
    finish: Finish | None = None
    context_phase_params: SignedContextPhaseParams | None = None
    seed: int = 0


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server can take; the numbers that refusals quote."""

    model: str
    vocab_size: int
    max_prompt_tokens: int
    max_total_tokens: int
    eos_token_ids: tuple[int, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    limits: ModelLimits
    dtype: str
    num_parameters: int
    architecture: str


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    incarnation: int
    version: str
    model: str = ""
    layout: KvLayout | None = None
    transport: str = ""
    rank_addresses: tuple[bytes, ...] = ()
    uptime_s: float = 0.0
    state: str = "starting"
    servers: tuple[ServerInfo, ...] = ()
    address: str = ""
    detail: str = ""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    num_queued: int = 0
    num_running: int = 0
    tokens_in_flight: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    sequence: int = 0


class ServerLedger(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ledger: LedgerAudit | None = None
    error: str = ""


class LedgerAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds what: ledger entries by state, blocks by state and by holder."""

    entries_by_state: dict[str, int] = {}
    blocks_by_state: dict[str, int] = {}
    blocks_by_owner: dict[str, int] = {}
    holders: dict[int, tuple[str, ...]] = {}
    counters: dict[str, int] = {}
    servers: tuple[ServerLedger, ...] = ()
