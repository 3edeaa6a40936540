"""The target machine, entry by entry."""

from __future__ import annotations

import pytest

from kv_transfer.target_session import (
    AbortAsked,
    Announced,
    AskResend,
    ClosePeer,
    Done,
    Failed,
    GrantCredit,
    Landed,
    PeerLost,
    PostReceive,
    SendAbort,
    SendAck,
    SourceStopped,
    Stalled,
    TargetEvent,
    TargetSession,
    TargetState,
)
from protos.errors import InternalError, RequestCancelledError

CANCELLED = RequestCancelledError("cancelled").to_data()


def session(num_positions: int = 8) -> TargetSession:
    return TargetSession("7-1", num_positions, block_bytes=10, count_max=4)


def announced(segment: int, first: int, count: int = 4, **changes: int) -> Announced:
    num_bytes = changes.get("num_bytes", 10 * count)
    return Announced(segment, first, count, num_bytes, changes.get("checksum", 5))


def test_the_straight_way() -> None:
    machine = session()
    assert machine.start() == []
    assert machine.handle(announced(0, 0)) == [PostReceive(0, 0, 4)]
    assert machine.handle(announced(1, 4)) == [PostReceive(1, 4, 4)]
    assert machine.handle(Landed(1, 5)) == [GrantCredit(1)]
    assert machine.handle(Landed(0, 5)) == [SendAck(), Done()]
    assert machine.state is TargetState.ENDED


def test_a_pull_of_nothing_is_done_at_its_start() -> None:
    assert session(0).start() == [SendAck(), Done()]


def test_damage_is_asked_for_once_and_then_fails() -> None:
    machine = session(4)
    machine.handle(announced(0, 0))
    assert machine.handle(Landed(0, 6)) == [AskResend(0)]
    assert machine.handle(announced(1, 0)) == [PostReceive(1, 0, 4)]
    assert machine.handle(Landed(1, 6)) == [SendAbort()]
    (failed,) = machine.handle(SourceStopped("aborted", ""))
    assert isinstance(failed, Failed)
    assert "checksum" in failed.error.message


def test_damage_then_a_good_copy() -> None:
    machine = session(4)
    machine.handle(announced(0, 0))
    machine.handle(Landed(0, 6))
    machine.handle(announced(1, 0))
    assert machine.handle(Landed(1, 5)) == [SendAck(), Done()]


@pytest.mark.parametrize(
    "wrong",
    [
        announced(1, 0),
        announced(0, 4),
        announced(0, 0, count=5),
        announced(0, 0, num_bytes=41),
        announced(0, 0, count=1 << 17),
    ],
    ids=repr,
)
def test_an_announcement_out_of_range_closes_the_peer(wrong: Announced) -> None:
    """Nothing that a peer announces may choose memory that the pull does not own."""
    machine = session()
    effects = machine.handle(wrong)
    assert isinstance(effects[0], ClosePeer)
    assert isinstance(effects[1], Failed)


def test_more_blocks_than_asked_for_closes_the_peer() -> None:
    machine = session(6)
    machine.handle(announced(0, 0))
    assert isinstance(machine.handle(announced(1, 4))[0], ClosePeer)


def test_abort_waits_for_the_fence_and_for_what_is_posted() -> None:
    """F17: the running segment lands in blocks that are still held."""
    machine = session()
    machine.handle(announced(0, 0))
    assert machine.handle(AbortAsked(CANCELLED)) == [SendAbort()]
    assert machine.handle(announced(1, 4)) == [PostReceive(1, 4, 4)]
    assert machine.handle(SourceStopped("aborted", "")) == []
    assert machine.handle(Landed(0, 5)) == []
    assert machine.handle(Landed(1, 5)) == [Failed(CANCELLED)]


def test_abort_fenced_after_the_last_landing() -> None:
    machine = session()
    machine.handle(announced(0, 0))
    machine.handle(AbortAsked(CANCELLED))
    assert machine.handle(Landed(0, 5)) == []
    assert machine.handle(SourceStopped("aborted", "")) == [Failed(CANCELLED)]


def test_an_unanswered_abort_ends_when_nothing_is_posted() -> None:
    machine = session()
    machine.handle(AbortAsked(CANCELLED))
    assert machine.handle(Stalled(False, 1.0)) == [Failed(CANCELLED)]


def test_an_unanswered_abort_with_a_receive_posted_closes_the_peer() -> None:
    machine = session()
    machine.handle(announced(0, 0))
    machine.handle(AbortAsked(CANCELLED))
    assert isinstance(machine.handle(Stalled(False, 1.0))[0], ClosePeer)
    assert machine.handle(Landed(0, error="closed")) == [Failed(CANCELLED)]


def test_a_silent_peer_is_closed_and_its_receives_awaited() -> None:
    machine = session()
    machine.handle(announced(0, 0))
    assert machine.handle(Stalled(True, 1.0)) == [ClosePeer("it was silent for 1 s")]
    assert machine.handle(PeerLost("closed")) == []
    (failed,) = machine.handle(Landed(0, error="closed"))
    assert isinstance(failed, Failed)
    assert "silent" in failed.error.message


def test_a_stall_with_a_living_peer_aborts_only_this_pull() -> None:
    assert session().handle(Stalled(False, 1.0)) == [SendAbort()]


def test_a_receive_left_after_the_source_stopped_is_not_waited_for_without_bound() -> None:
    machine = session()
    machine.handle(announced(0, 0))
    assert machine.handle(SourceStopped("lease", "expired")) == []
    assert isinstance(machine.handle(Stalled(False, 1.0))[0], ClosePeer)
    (failed,) = machine.handle(Landed(0, error="closed"))
    assert isinstance(failed, Failed)
    assert "lease" in failed.error.message, "the first cause is the one that is told"


EVENTS: list[TargetEvent] = [
    announced(0, 0),
    Landed(0),
    SourceStopped("", ""),
    AbortAsked(CANCELLED),
    Stalled(True, 1.0),
    PeerLost("gone"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_nothing_may_come_after_the_end(event: TargetEvent) -> None:
    machine = session()
    machine.handle(PeerLost("gone"))
    with pytest.raises(InternalError, match="pulling <- PeerLost"):
        machine.handle(event)
