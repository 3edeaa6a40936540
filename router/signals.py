"""What goes into a request's machine (events) and what comes out of it (effects).

Plain data. Effects that only start or stop something come before the writes to
the client (`Emit`, `Finish`, `Fail`), so that a shell interrupted in a write has
lost nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protos.errors import (
    BatonError,
    DeadlineExceededError,
    RequestCancelledError,
    ServerUnavailableError,
)
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    GenerateChunk,
    SignedContextPhaseParams,
)


class Leg(enum.StrEnum):
    """One call to one server. `WHOLE` does both phases on it."""

    CONTEXT = "context"
    GENERATION = "generation"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Lease:
    """What is needed to renew or release handed-off KV."""

    disagg_request_id: DisaggRequestId
    pull_token: bytes
    lease_ms: int


# --- events -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The request is admitted and valid."""


@dataclass(frozen=True, slots=True)
class ContextChunk:
    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class ContextFinished:
    """The last message of a context leg; `params` where it yielded a hand-off."""

    chunk: GenerateChunk
    params: ContextPhaseParams | None


@dataclass(frozen=True, slots=True)
class ContextFailed:
    error: BatonError


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    error: BatonError


@dataclass(frozen=True, slots=True)
class WholeChunk:
    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class WholeFinished:
    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class WholeFailed:
    error: BatonError


@dataclass(frozen=True, slots=True)
class ClientCancelled:
    """The client left, or somebody aborted the request."""

    reason: str = "the client left"


@dataclass(frozen=True, slots=True)
class DeadlineExpired:
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """The router stops and its grace is over. `why` says what else is wrong, if anything."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class PartnersLost:
    """No generation server is left for the KV that the context leg is making."""

    reason: str


Interrupt = ClientCancelled | DeadlineExpired | Drained | PartnersLost
LegFailed = ContextFailed | GenerationFailed | WholeFailed
Event = (
    Started
    | ContextChunk
    | ContextFinished
    | GenerationChunk
    | GenerationFinished
    | WholeChunk
    | WholeFinished
    | LegFailed
    | Interrupt
)


# --- effects ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallContext:
    """Choose and reserve a context server and send it the context_only request."""


@dataclass(frozen=True, slots=True)
class CallGeneration:
    """Choose and reserve a generation server and send it the hand-off."""

    signed: SignedContextPhaseParams


@dataclass(frozen=True, slots=True)
class CallWhole:
    """Choose and reserve a server that answers the whole request."""


@dataclass(frozen=True, slots=True)
class CancelLeg:
    leg: Leg


@dataclass(frozen=True, slots=True)
class FreeReservation:
    leg: Leg


@dataclass(frozen=True, slots=True)
class StartRenewing:
    lease: Lease


@dataclass(frozen=True, slots=True)
class StopRenewing:
    pass


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Emit:
    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class Finish:
    """The last message of a good answer. A terminal: nothing follows."""

    chunk: GenerateChunk


@dataclass(frozen=True, slots=True)
class Fail:
    """A terminal: nothing follows."""

    error: BatonError


Effect = (
    CallContext
    | CallGeneration
    | CallWhole
    | CancelLeg
    | FreeReservation
    | StartRenewing
    | StopRenewing
    | ReleaseLease
    | Emit
    | Finish
    | Fail
)


def interrupt_error(event: Interrupt) -> BatonError:
    """How an interrupt looks to the client."""
    match event:
        case ClientCancelled(reason):
            return RequestCancelledError(f"cancelled: {reason}")
        case DeadlineExpired(deadline_s):
            return DeadlineExceededError(
                f"the deadline of {deadline_s:g} s is over",
                field="deadline_ms",
                value=round(deadline_s * 1000),
            )
        case Drained(why):
            told = f" ({why})" if why else ""
            return ServerUnavailableError(f"the router is shutting down{told}")
        case PartnersLost(reason):
            return ServerUnavailableError(reason)
