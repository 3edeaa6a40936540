"""One pull as the generation side sees it: a pure machine, events in, effects out.

    PULLING --AbortAsked, damage, stall--> ABORTING --Stopped and all landed--> ENDED
    PULLING --SourceStopped, PeerLost--> CLOSING --all landed--> ENDED
    PULLING --every block verified--> ENDED (Done)

A receive is posted for each announcement, also in ABORTING: the segment is on
its way and must land somewhere, and these blocks are still ours. `Failed` is
said only when no posted receive is left, so the blocks are free of the wire the
moment the engine hears of it. `Done` or `Failed` is said exactly once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kv_transfer.story import Story
from protos.errors import BatonError, ErrorData, InternalError, KvTransferError

RESENDS_PER_PIECE_MAX = 1


class TargetState(enum.Enum):
    PULLING = "pulling"
    ABORTING = "aborting"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Announced:
    segment: int
    first: int
    count: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Landed:
    """A posted receive ended; `checksum` is of what now lies in the blocks."""

    segment: int
    checksum: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SourceStopped:
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class AbortAsked:
    error: ErrorData


@dataclass(frozen=True, slots=True)
class Stalled:
    is_peer_silent: bool
    stall_s: float


@dataclass(frozen=True, slots=True)
class PeerLost:
    cause: str


TargetEvent: TypeAlias = Announced | Landed | SourceStopped | AbortAsked | Stalled | PeerLost


@dataclass(frozen=True, slots=True)
class PostReceive:
    segment: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class GrantCredit:
    segments: int


@dataclass(frozen=True, slots=True)
class AskResend:
    segment: int


@dataclass(frozen=True, slots=True)
class SendAck:
    pass


@dataclass(frozen=True, slots=True)
class SendAbort:
    pass


@dataclass(frozen=True, slots=True)
class ClosePeer:
    cause: str


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    error: ErrorData


TargetEffect: TypeAlias = (
    PostReceive | GrantCredit | AskResend | SendAck | SendAbort | ClosePeer | Done | Failed
)
TargetEffects: TypeAlias = list[TargetEffect]


class TargetSession:
    """See the module's docstring. `handle` is the only way in."""

    def __init__(self, title: str, num_positions: int, block_bytes: int, count_max: int) -> None:
        self.state = TargetState.PULLING
        self.pending: dict[int, Announced] = {}
        self._title = title
        self._num_positions = num_positions
        self._block_bytes = block_bytes
        self._count_max = count_max
        self._num_verified = 0
        self._next_segment = 0
        self._next_first = 0
        self._resends_awaited: dict[int, int] = {}
        self._resends_asked: dict[int, int] = {}
        self._error: ErrorData | None = None
        self._story = Story(title)

    def start(self) -> TargetEffects:
        """A pull of nothing only acknowledges."""
        return self._finish_if_complete()

    def handle(self, event: TargetEvent) -> TargetEffects:
        self._story.add(self.state.value, event)
        transition = _TABLE.get((self.state, type(event)))
        if transition is None:
            raise InternalError(f"no way on for a target session: {self._story}")
        effects = transition(self, event)
        self.check()
        return effects

    def check(self) -> None:
        assert 0 <= self._num_verified <= self._num_positions, str(self._story)
        if self.state is TargetState.ENDED:
            assert not self.pending, str(self._story)

    def _on_announced(self, event: Announced) -> TargetEffects:
        wrong = self._what_is_wrong(event)
        if wrong:
            return self._lose_peer(f"it broke the protocol: {wrong}")
        self._next_segment += 1
        if self._resends_awaited.pop(event.first, None) is None:
            self._next_first += event.count
        self.pending[event.segment] = event
        return [PostReceive(event.segment, event.first, event.count)]

    def _what_is_wrong(self, event: Announced) -> str:
        if event.segment != self._next_segment:
            return f"segment {event.segment} announced, {self._next_segment} expected"
        if event.num_bytes != event.count * self._block_bytes:
            return f"{event.num_bytes} bytes announced for {event.count} blocks"
        awaited = self._resends_awaited.get(event.first)
        if awaited is not None:
            return "" if event.count == awaited else f"{event.count} blocks resent, not {awaited}"
        if event.first != self._next_first or event.count > self._count_max:
            return f"blocks {event.first}+{event.count} announced, {self._next_first} expected"
        if event.first + event.count > self._num_positions:
            return f"{event.first + event.count} blocks announced of {self._num_positions}"
        return ""

    def _on_landed(self, event: Landed) -> TargetEffects:
        announced = self.pending.pop(event.segment)
        if event.error:
            return self._abort(self._failure(f"the receive failed: {event.error}"))
        if event.checksum != announced.checksum:
            return self._on_damage(announced)
        self._num_verified += announced.count
        if self._num_verified == self._num_positions:
            return self._finish_if_complete()
        return [GrantCredit(1)]

    def _on_damage(self, announced: Announced) -> TargetEffects:
        asked = self._resends_asked.get(announced.first, 0)
        if asked >= RESENDS_PER_PIECE_MAX:
            return self._abort(self._failure("the checksum of a segment was wrong twice"))
        self._resends_asked[announced.first] = asked + 1
        self._resends_awaited[announced.first] = announced.count
        return [AskResend(announced.segment)]

    def _finish_if_complete(self) -> TargetEffects:
        if self._num_verified < self._num_positions:
            return []
        self.state = TargetState.ENDED
        return [SendAck(), Done()]

    def _on_stopped(self, event: SourceStopped) -> TargetEffects:
        return self._close(self._failure(f"the source stopped ({event.reason}): {event.message}"))

    def _on_abort_asked(self, event: AbortAsked) -> TargetEffects:
        return self._abort(event.error)

    def _on_stalled(self, event: Stalled) -> TargetEffects:
        if event.is_peer_silent:
            return self._lose_peer(f"it was silent for {event.stall_s:g} s")
        return self._abort(self._failure(f"no progress for {event.stall_s:g} s"))

    def _on_peer_lost(self, event: PeerLost) -> TargetEffects:
        return self._close(self._failure(f"the peer is gone: {event.cause}"))

    def _on_landed_late(self, event: Landed) -> TargetEffects:
        del self.pending[event.segment]
        return self._fail_if_fenced() if self.state is TargetState.CLOSING else []

    def _on_stalled_aborting(self, event: Stalled) -> TargetEffects:
        """With nothing posted nothing can land, so the answer need not be waited for."""
        if not self.pending:
            return self._close()
        return self._lose_peer(f"no answer to an abort for {event.stall_s:g} s")

    def _on_stalled_closing(self, event: Stalled) -> TargetEffects:
        return [ClosePeer(f"a segment did not land for {event.stall_s:g} s")]

    def _on_fenced(self, _event: SourceStopped | PeerLost) -> TargetEffects:
        return self._close()

    def _ignore(self, _event: TargetEvent) -> TargetEffects:
        return []

    def _abort(self, error: ErrorData) -> TargetEffects:
        self._error = self._error or error
        self.state = TargetState.ABORTING
        return [SendAbort()]

    def _lose_peer(self, cause: str) -> TargetEffects:
        """Closing the peer ends every receive, each by its own event, and then says PeerLost."""
        self._error = self._error or self._failure(cause)
        self.state = TargetState.CLOSING
        return [ClosePeer(cause), *self._fail_if_fenced()]

    def _close(self, error: ErrorData | None = None) -> TargetEffects:
        self._error = self._error or error
        self.state = TargetState.CLOSING
        return self._fail_if_fenced()

    def _fail_if_fenced(self) -> TargetEffects:
        if self.pending:
            return []
        assert self._error is not None, str(self._story)
        self.state = TargetState.ENDED
        return [Failed(self._error)]

    def _failure(self, message: str) -> ErrorData:
        error: BatonError = KvTransferError(f"pull {self._title}: {message}")
        return error.to_data()


_T = TargetState
_Transition: TypeAlias = Callable[[TargetSession, Any], TargetEffects]
_TABLE: dict[tuple[TargetState, type], _Transition] = {
    (_T.PULLING, Announced): TargetSession._on_announced,
    (_T.PULLING, Landed): TargetSession._on_landed,
    (_T.PULLING, SourceStopped): TargetSession._on_stopped,
    (_T.PULLING, AbortAsked): TargetSession._on_abort_asked,
    (_T.PULLING, Stalled): TargetSession._on_stalled,
    (_T.PULLING, PeerLost): TargetSession._on_peer_lost,
    (_T.ABORTING, Announced): TargetSession._on_announced,
    (_T.ABORTING, Landed): TargetSession._on_landed_late,
    (_T.ABORTING, SourceStopped): TargetSession._on_fenced,
    (_T.ABORTING, AbortAsked): TargetSession._ignore,
    (_T.ABORTING, Stalled): TargetSession._on_stalled_aborting,
    (_T.ABORTING, PeerLost): TargetSession._on_fenced,
    (_T.CLOSING, Announced): TargetSession._ignore,
    (_T.CLOSING, Landed): TargetSession._on_landed_late,
    (_T.CLOSING, SourceStopped): TargetSession._ignore,
    (_T.CLOSING, AbortAsked): TargetSession._ignore,
    (_T.CLOSING, Stalled): TargetSession._on_stalled_closing,
    (_T.CLOSING, PeerLost): TargetSession._ignore,
}
