"""The Engine seam: what the executor's worker drives, and what it gets back.

The worker owns the loop: it drains its inbox into `submit`, `abort`, `release`
and `renew`, calls `step` while `has_work`, and otherwise sleeps until a message
or the engine's own wake-up (an arrived KV transfer, a lease's end) comes.

Contract (tests/contract runs it for every implementation):

- Every submitted `request_id` ends by exactly one `EngineOutput` with `finish`
  or `error` set, also after `abort` (error RequestCancelledError).
- `submit` raises RequestError for a request it cannot ever serve and then
  produces no output for it.
- `step` never blocks for a peer; it raises only when the engine is dead.
- After the last request ended and the last lease is over, `audit()` is back at
  the state before the first, but for cached blocks.
- While the engine sleeps (`control`), `submit` raises NotNowError.
- Deadlines are durations; the engine ends an expired request by itself with
  DeadlineExceededError.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from executor.engine.control_seam import EngineControl
from executor.engine.local import LocalExtras, LocalOutput
from protos.errors import ErrorData
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    FinishReason,
    KvLayout,
    KvStats,
    Load,
    ModelInfo,
    RequestType,
    SamplingParams,
    StageTimes,
    Usage,
)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to run.

    `prompt_token_ids` are int32 little-endian bytes. `sampling.max_tokens` and
    `sampling.seed` are always set here. A generation_only request carries the
    verified `context_phase_params`; its first tokens count as already streamed:
    outputs start at `token_index == len(first_token_ids)`.

    `output_prefix_token_ids`, packed like the prompt, are tokens of the answer that
    exist already (context_and_generation only): they follow the prompt in the KV and
    count against `max_tokens`, but are neither emitted nor counted in usage; outputs
    start behind them and are those of the unbroken run.
    """

    request_id: int
    request_type: RequestType
    prompt_token_ids: bytes
    sampling: SamplingParams
    deadline_s: float
    disagg_request_id: DisaggRequestId | None = None
    context_phase_params: ContextPhaseParams | None = None
    cache_salt: str = ""
    output_prefix_token_ids: bytes = b""
    return_context_logits: bool = False
    """All of the prompt is computed for it: the prefix cache serves it nothing."""
    return_generation_logits: bool = False
    local: LocalExtras | None = None
    """Never sent: encoding a request that has one is a TypeError."""


class EngineFinish(msgspec.Struct, frozen=True, kw_only=True):
    reason: FinishReason
    stop_token_id: int | None = None
    usage: Usage
    kv: KvStats = KvStats()
    timing: StageTimes = StageTimes()
    context_phase_params: ContextPhaseParams | None = None
    """Set when `reason` is CONTEXT: the lease is already in place."""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What one step said about one request. The last one has `finish` or `error`.

    The last one of an aborted request has `error` and may have `finish` too, with
    what was used until then: a stop string ends a request by an abort, and its
    answer still tells usage and times.
    """

    request_id: int
    token_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish: EngineFinish | None = None
    error: ErrorData | None = None
    local: LocalOutput | None = None
    """Logits, where the request asked for them. Never sent, as in a request."""


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Known once the model is loaded; what GetServerInfo and GetModelInfo tell."""

    incarnation: int
    model_info: ModelInfo
    layout: KvLayout
    transport: str
    rank_addresses: tuple[bytes, ...]
    wires: str
    num_blocks: int


class EngineAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by state (free, reserved, live, cached), by kind of holder, and one by one."""

    blocks_by_state: dict[str, int]
    blocks_by_owner: dict[str, int]
    holders: dict[int, tuple[str, ...]]
    sequences_by_state: dict[str, int]
    counters: dict[str, int]


class Engine(Protocol):
    """See the module's docstring for the contract."""

    @property
    def identity(self) -> EngineIdentity: ...

    @property
    def control(self) -> EngineControl:
        """Sleep, profiles, statistics and the like: control_seam.py."""

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: int) -> None:
        """Free all it holds at the next step. Unknown and finished ids are ignored."""

    def release(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        """End a lease (or leave a tombstone that refuses its pull). True where one was live."""

    def renew(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        """Start a lease's duration anew. True where one was live."""

    @property
    def progress(self) -> int:
        """Grows while `step` gets on, within a long step too. Read from another thread."""

    def has_work(self) -> bool:
        """True when `step` would do something now."""

    def next_deadline_s(self) -> float | None:
        """Seconds until `step` must be called even without news; None: never."""

    def step(self) -> list[EngineOutput]: ...

    def load(self) -> Load: ...

    def audit(self) -> EngineAudit:
        """A consistent picture; raises AssertionError where a holder is not accounted for."""

    def close(self) -> None:
        """Bounded and idempotent; open requests end without an output."""
