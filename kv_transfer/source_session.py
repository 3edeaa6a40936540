"""One pull as the context side sees it: a pure machine, events in, effects out.

    SENDING --Acked, AbortAsked, LeaseOver, PeerLost, SendFailed--> CLOSING --> ENDED

SENDING announces and sends segments against the target's credit. Whatever ends
it, CLOSING lasts until no send operation reads the blocks any more; only then
is `TransferOver` said, exactly once. The lease is a different thing with its
own life: a session asks for its end (`EndLease`) or hears of it (`LeaseOver`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kv_transfer.frames import MAX_SEGMENTS
from kv_transfer.story import Story
from protos.errors import InternalError


class SourceState(enum.Enum):
    SENDING = "sending"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Granted:
    segments: int


@dataclass(frozen=True, slots=True)
class SegmentLeft:
    """A send operation ended: its memory is no longer read. `error` is empty where it went well."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class ResendAsked:
    segment: int


@dataclass(frozen=True, slots=True)
class Acked:
    pass


@dataclass(frozen=True, slots=True)
class AbortAsked:
    pass


@dataclass(frozen=True, slots=True)
class LeaseOver:
    cause: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    cause: str


SourceEvent: TypeAlias = (
    Granted | SegmentLeft | ResendAsked | Acked | AbortAsked | LeaseOver | PeerLost
)


@dataclass(frozen=True, slots=True)
class SendSegment:
    """Checksum, announce and send positions[first : first + count]."""

    segment: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SayStopped:
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class EndLease:
    cause: str


@dataclass(frozen=True, slots=True)
class TransferOver:
    pass


SourceEffect: TypeAlias = SendSegment | SayStopped | EndLease | TransferOver
SourceEffects: TypeAlias = list[SourceEffect]


def cut_segments(num_positions: int, blocks_per_segment: int) -> list[tuple[int, int]]:
    """(first, count) pieces of at most `blocks_per_segment` positions, in order."""
    assert blocks_per_segment > 0
    return [
        (first, min(blocks_per_segment, num_positions - first))
        for first in range(0, num_positions, blocks_per_segment)
    ]


class SourceSession:
    """See the module's docstring. `handle` is the only way in."""

    def __init__(self, title: str, segments: Sequence[tuple[int, int]]) -> None:
        self.state = SourceState.SENDING
        self.sends_in_flight = 0
        self._waiting = deque(segments)
        self._sent: dict[int, tuple[int, int]] = {}
        self._credit = 0
        self._next_segment = 0
        self._story = Story(title)

    def handle(self, event: SourceEvent) -> SourceEffects:
        self._story.add(self.state.value, event)
        transition = _TABLE.get((self.state, type(event)))
        if transition is None:
            raise InternalError(f"no way on for a source session: {self._story}")
        effects = transition(self, event)
        self.check()
        return effects

    def check(self) -> None:
        assert self.sends_in_flight >= 0, str(self._story)
        assert self._credit >= 0, str(self._story)
        if self.state is SourceState.ENDED:
            assert self.sends_in_flight == 0, str(self._story)

    def _on_granted(self, event: Granted) -> SourceEffects:
        self._credit += event.segments
        return self._send()

    def _on_segment_left(self, event: SegmentLeft) -> SourceEffects:
        self.sends_in_flight -= 1
        if event.error:
            return [EndLease("peer_down"), *self._close("failed", f"send failed: {event.error}")]
        return []

    def _on_resend_asked(self, event: ResendAsked) -> SourceEffects:
        piece = self._sent.pop(event.segment, None)
        if piece is None:
            return []
        self._credit += 1
        self._waiting.appendleft(piece)
        return self._send()

    def _on_acked(self, _event: Acked) -> SourceEffects:
        return [EndLease("acked"), *self._close()]

    def _on_abort_asked(self, _event: AbortAsked) -> SourceEffects:
        return [EndLease("aborted"), *self._close("aborted", "stopped as the target asked")]

    def _on_lease_over(self, event: LeaseOver) -> SourceEffects:
        return self._close("lease", f"the lease ended: {event.cause}")

    def _on_peer_lost(self, _event: PeerLost) -> SourceEffects:
        return [EndLease("peer_down"), *self._close()]

    def _on_segment_left_closing(self, _event: SegmentLeft) -> SourceEffects:
        self.sends_in_flight -= 1
        return self._end_if_fenced()

    def _on_abort_closing(self, _event: AbortAsked) -> SourceEffects:
        return [SayStopped("aborted", "stopped as the target asked")]

    def _ignore(self, _event: SourceEvent) -> SourceEffects:
        return []

    def _send(self) -> SourceEffects:
        effects: SourceEffects = []
        while self._waiting and self._credit:
            segment = self._next_segment
            if segment > MAX_SEGMENTS:
                return [*effects, EndLease("aborted"), *self._close("failed", "too many segments")]
            self._next_segment += 1
            first, count = self._waiting.popleft()
            self._sent[segment] = (first, count)
            self._credit -= 1
            self.sends_in_flight += 1
            effects.append(SendSegment(segment, first, count))
        return effects

    def _close(self, reason: str = "", message: str = "") -> SourceEffects:
        self.state = SourceState.CLOSING
        self._waiting.clear()
        said: SourceEffects = [SayStopped(reason, message)] if reason else []
        return said + self._end_if_fenced()

    def _end_if_fenced(self) -> SourceEffects:
        if self.sends_in_flight:
            return []
        self.state = SourceState.ENDED
        return [TransferOver()]


_S = SourceState
_Transition: TypeAlias = Callable[[SourceSession, Any], SourceEffects]
_TABLE: dict[tuple[SourceState, type], _Transition] = {
    (_S.SENDING, Granted): SourceSession._on_granted,
    (_S.SENDING, SegmentLeft): SourceSession._on_segment_left,
    (_S.SENDING, ResendAsked): SourceSession._on_resend_asked,
    (_S.SENDING, Acked): SourceSession._on_acked,
    (_S.SENDING, AbortAsked): SourceSession._on_abort_asked,
    (_S.SENDING, LeaseOver): SourceSession._on_lease_over,
    (_S.SENDING, PeerLost): SourceSession._on_peer_lost,
    (_S.CLOSING, Granted): SourceSession._ignore,
    (_S.CLOSING, SegmentLeft): SourceSession._on_segment_left_closing,
    (_S.CLOSING, ResendAsked): SourceSession._ignore,
    (_S.CLOSING, Acked): SourceSession._ignore,
    (_S.CLOSING, AbortAsked): SourceSession._on_abort_closing,
    (_S.CLOSING, LeaseOver): SourceSession._ignore,
    (_S.CLOSING, PeerLost): SourceSession._ignore,
}
