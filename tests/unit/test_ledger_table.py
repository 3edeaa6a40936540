"""The ledger's table, pair by pair, and its books."""

from __future__ import annotations

import pytest

from executor.ledger import (
    COUNTER_BITS,
    LIVE,
    TABLE,
    TERMINAL,
    Adoption,
    Entry,
    Event,
    Ledger,
    Outcome,
    State,
)
from protos.errors import DuplicateRequestError, InternalError

WAYS_IN = {
    State.REGISTERED: [],
    State.SENT: [Event.SEND],
    State.RUNNING: [Event.SEND, Event.ACCEPT],
    State.STREAMING: [Event.SEND, Event.TOKENS],
    State.CANCELLING: [Event.SEND, Event.CANCEL],
    State.FINISHED: [Event.SEND, Event.FINISH],
    State.CANCELLED: [Event.SEND, Event.CONFIRM],
    State.FAILED: [Event.FAIL],
    State.TOMBSTONE: [Event.FAIL, Event.BURY],
}


def entry_in(state: State) -> Entry:
    entry = Entry(1, "x")
    for event in WAYS_IN[state]:
        entry.move(event)
    assert entry.state is state
    return entry


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_moves_by_the_table_or_raises_with_the_story(state: State, event: Event) -> None:
    """Guards: an impossible pair that passes in silence hides a lost or doubled answer."""
    entry = entry_in(state)
    target = TABLE.get((state, event))
    if target is None:
        with pytest.raises(InternalError, match=f"got {event} in state {state}"):
            entry.move(event)
        assert entry.state is state
    else:
        entry.move(event)
        assert entry.state is target


def test_only_endings_end_and_the_dead_stay_dead() -> None:
    """Guards: a table edited so that a tombstone comes back to life."""
    for (state, event), target in TABLE.items():
        if state in TERMINAL:
            assert (event, target) == (Event.BURY, State.TOMBSTONE)
        if state is State.TOMBSTONE:
            assert target is State.TOMBSTONE
    for state in LIVE:
        assert any(TABLE.get((state, event)) in TERMINAL for event in Event)


def test_external_id_is_unique_while_live_and_free_after() -> None:
    """Guards: a retry refused after its first try ended, or two live with one id."""
    ledger = Ledger()
    first = ledger.register("a")
    with pytest.raises(DuplicateRequestError, match="'a'"):
        ledger.register("a")
    ledger.apply(first, Event.FAIL)
    assert ledger.register("a") != first
    ledger.check()


def test_late_unknown_and_duplicate_are_told_apart_within_a_bounded_window() -> None:
    """Guards: a tombstone window that grows without end, or counts one thing as another."""
    ledger = Ledger(tombstones_max=2)
    ids = [ledger.register(name) for name in "abc"]
    for client_id in ids:
        ledger.apply(client_id, Event.FAIL)
    assert ledger.apply(ids[0], Event.TOKENS) is Outcome.UNKNOWN  # pushed out
    assert ledger.apply(ids[2], Event.TOKENS) is Outcome.LATE
    assert ledger.apply(ids[2], Event.FINISH) is Outcome.LATE
    assert (ledger.num_unknown, ledger.num_late, ledger.num_duplicate) == (1, 1, 1)
    ledger.check()


def test_client_ids_bear_the_frontend_and_a_full_counter_is_an_error() -> None:
    """Guards: a wrapped counter that gives a live id to a second request."""
    ledger = Ledger(frontend_id=5, counter_max=1)
    assert ledger.register("a") == (5 << 48) | 1
    with pytest.raises(InternalError, match="counter of client ids is full at 1"):
        ledger.register("b")


def test_a_cancel_before_its_request_refuses_it_once() -> None:
    """Guards a request that runs for ever because its cancel overtook it; and a second copy of
    it that was answered again, since its tombstone stayed a refusal for ever."""
    ledger = Ledger()
    ledger.refuse(9)
    ledger.refuse(9)
    assert ledger.adopt(9) is Adoption.REFUSED
    assert ledger.adopt(9) is Adoption.DUPLICATE
    assert ledger.adopt(10) is Adoption.NEW
    assert ledger.adopt(10) is Adoption.DUPLICATE
    counters = ledger.counters()
    assert (counters["registered"], counters["cancelled"], counters["duplicate"]) == (2, 1, 2)
    with pytest.raises(InternalError, match="got send in state tombstone"):
        ledger.apply(9, Event.SEND)
    ledger.check()


def test_lanes_are_kept_apart() -> None:
    """Guards: the end of one frontend that touches, or walks over, the requests of another."""
    ledger = Ledger()
    mine, other = (1 << COUNTER_BITS) | 1, (2 << COUNTER_BITS) | 1
    for client_id in (mine, other, mine + 1):
        assert ledger.adopt(client_id) is Adoption.NEW
    assert ledger.live_of(1) == (mine, mine + 1)
    assert ledger.live_of(2) == (other,)
    assert ledger.live_of(3) == ()
    assert ledger.is_of_lane(mine, 1)
    assert not ledger.is_of_lane(other, 1)
    assert not ledger.is_of_lane(-1, 1)
    assert ledger.num_foreign == 2
    ledger.apply(other, Event.FAIL)
    assert ledger.live_of(2) == ()
    ledger.check()


def longest_way(state: State) -> int:
    ways = [target for (start, _), target in TABLE.items() if start is state is not target]
    return max((1 + longest_way(target) for target in ways), default=0)


def test_a_story_is_short_whatever_happens() -> None:
    """Guards: a request that keeps one line of story for each token; ends this test by a
    RecursionError where the table has a way round."""
    assert longest_way(State.REGISTERED) == 6
    entry = entry_in(State.STREAMING)
    for _ in range(1000):
        entry.move(Event.TOKENS)
    entry.move(Event.FINISH)
    assert entry.story == "send->sent tokens->streaming finish->finished"
