"""The source machine, entry by entry."""

from __future__ import annotations

import pytest

from kv_transfer.source_session import (
    AbortAsked,
    Acked,
    EndLease,
    Granted,
    LeaseOver,
    PeerLost,
    ResendAsked,
    SayStopped,
    SegmentLeft,
    SendSegment,
    SourceEvent,
    SourceSession,
    SourceState,
    TransferOver,
    cut_segments,
)
from protos.errors import InternalError

EVENTS: list[SourceEvent] = [
    Granted(1),
    SegmentLeft(),
    ResendAsked(0),
    Acked(),
    AbortAsked(),
    LeaseOver("expired"),
    PeerLost("gone"),
]


def session(num_segments: int = 3) -> SourceSession:
    return SourceSession("test", [(4 * i, 4) for i in range(num_segments)])


@pytest.mark.parametrize(
    ("num_positions", "pieces"),
    [(0, []), (1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 1)]), (8, [(0, 4), (4, 4)])],
)
def test_cut_segments(num_positions: int, pieces: list[tuple[int, int]]) -> None:
    assert cut_segments(num_positions, 4) == pieces


def test_sends_only_against_credit() -> None:
    machine = session()
    assert machine.handle(Granted(2)) == [SendSegment(0, 0, 4), SendSegment(1, 4, 4)]
    assert machine.handle(Granted(5)) == [SendSegment(2, 8, 4)]
    assert machine.handle(Granted(1)) == []


def test_ack_ends_the_lease_at_once_but_the_transfer_only_after_the_sends() -> None:
    """Invariant 3: an ack frees nothing that an operation still reads."""
    machine = session(1)
    machine.handle(Granted(1))
    assert machine.handle(Acked()) == [EndLease("acked")]
    assert machine.handle(SegmentLeft()) == [TransferOver()]
    assert machine.state is SourceState.ENDED


def test_a_resent_segment_gets_a_new_number() -> None:
    """A tag is never used twice, so a late first copy cannot land in the second's place."""
    machine = session(2)
    machine.handle(Granted(2))
    assert machine.handle(ResendAsked(0)) == [SendSegment(2, 0, 4)]
    assert machine.handle(ResendAsked(0)) == []
    assert machine.handle(ResendAsked(99)) == []


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            AbortAsked(),
            [EndLease("aborted"), SayStopped("aborted", "stopped as the target asked")],
        ),
        (LeaseOver("expired"), [SayStopped("lease", "the lease ended: expired")]),
        (PeerLost("gone"), [EndLease("peer_down")]),
    ],
)
def test_what_ends_it_waits_for_the_running_sends(event: SourceEvent, said: list[object]) -> None:
    machine = session()
    machine.handle(Granted(2))
    assert machine.handle(event) == said
    assert machine.handle(Granted(1)) == []
    assert machine.handle(SegmentLeft()) == []
    assert machine.handle(SegmentLeft("the peer is gone")) == [TransferOver()]


def test_a_failed_send_ends_it() -> None:
    machine = session()
    machine.handle(Granted(1))
    assert machine.handle(SegmentLeft("broken")) == [
        EndLease("peer_down"),
        SayStopped("failed", "send failed: broken"),
        TransferOver(),
    ]


def test_an_abort_while_closing_is_answered() -> None:
    """The target waits for `Stopped`; an expiry that came first must not swallow it."""
    machine = session()
    machine.handle(Granted(1))
    machine.handle(LeaseOver("expired"))
    assert machine.handle(AbortAsked()) == [SayStopped("aborted", "stopped as the target asked")]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_nothing_may_come_after_the_end(event: SourceEvent) -> None:
    machine = session()
    machine.handle(PeerLost("gone"))
    with pytest.raises(InternalError, match="sending <- PeerLost"):
        machine.handle(event)
