"""The pure parts of the postprocess workers' frontend side: window, life, watch."""

from __future__ import annotations

import msgspec
import pytest

from executor.post.life import BucketLife, BucketState, Next
from executor.post.limits import PostLimits
from executor.post.messages import Work
from executor.post.watch import AnswerWatch, RestartBudget
from executor.post.window import BucketWindow
from executor.postprocess import TextParams
from protos.errors import InvalidRequestError

PARAMS = TextParams(stop=(), context_token_ids=(1,), first_token_ids=(), num_prompt_tokens=1)
LIMITS = PostLimits(works_in_flight_max=2, work_bytes_max=4, backlog_bytes_max=8)
BYTES_MAX = 1 << 20


def window() -> BucketWindow:
    return BucketWindow(LIMITS, BYTES_MAX)


def test_parameters_cross_once_with_the_first_outputs_that_leave() -> None:
    """Guards: parameters sent for every step, or for a request that says nothing."""
    w = window()
    w.open(7, PARAMS)
    assert w.take(0.0) is None
    w.put(b"a")
    assert w.take(0.0) == Work(1, ((7, PARAMS),), (), (b"a",))
    w.put(b"b")
    assert w.take(0.0) == Work(2, (), (), (b"b",))
    w.check()


def test_what_waits_is_merged_up_to_a_size_and_in_order() -> None:
    """Guards: one message per step for a worker that is behind, and a message over its bound."""
    w = window()
    for payload in (b"a", b"b"):
        w.put(payload)
        assert w.take(0.0) is not None
    for payload in (b"c", b"dd", b"ee", b"oversized"):
        w.put(payload)
        assert w.take(0.0) is None
    was_full = w.is_full
    taken = []
    for number in range(1, 5):
        assert w.on_answer(number, 0.0)
        taken.append(w.take(0.0))
        w.check()
    payloads = [work.payloads for work in taken if work is not None]
    assert payloads == [(b"c", b"dd"), (b"ee",), (b"oversized",)]
    assert (was_full, w.is_full) == (True, False)


def test_no_message_is_over_its_bound_and_what_does_not_fit_comes_in_order() -> None:
    """Bug: all parameters that waited left in one message. Over a frame's bound it cut the
    connection to the worker, and the whole bucket failed."""
    w = BucketWindow(LIMITS, bytes_max=200)
    for client_id in range(3):
        w.open(client_id, PARAMS)  # 69 bytes at most
    for payload in (b"a" * 100, b"b" * 200, b"c"):
        w.put(payload)
    works = [w.take(0.0)]
    for number in range(1, 5):
        works.append(w.take(0.0))
        assert w.on_answer(number, 0.0, is_part=True)
        assert w.on_answer(number, 0.0)
        w.check()
    told = [([c for c, _ in work.opened], work.payloads) for work in works if work is not None]
    assert told == [
        ([0, 1], ()),
        ([2], (b"a" * 100,)),
        ([], (b"b" * 200,)),
        ([], (b"c",)),
    ]


def test_parameters_that_no_message_can_hold_are_refused_by_name() -> None:
    w = BucketWindow(LIMITS, bytes_max=200)
    with pytest.raises(InvalidRequestError, match="must be at most 200") as refused:
        w.open(7, msgspec.structs.replace(PARAMS, first_token_ids=tuple(range(40))))
    assert refused.value.field == "output_prefix_token_ids"
    w.check()
    w.put(b"a")
    assert w.take(0.0) == Work(1, (), (), (b"a",))


def test_the_clock_runs_from_the_last_answer_while_one_is_due() -> None:
    """Guards: a busy worker that counts as silent, an idle one that does."""
    w = window()
    since_s = [w.waiting_since_s]
    for at_s in (1.0, 2.0):
        w.put(b"a")
        w.take(at_s)
    since_s.append(w.waiting_since_s)
    for number, at_s in ((1, 5.0), (2, 6.0)):
        w.on_answer(number, at_s)
        since_s.append(w.waiting_since_s)
    assert since_s == [None, 1.0, 5.0, None]


def test_an_answer_to_nothing_is_counted_and_changes_nothing() -> None:
    w = window()
    w.put(b"a")
    w.take(0.0)
    for number in (0, 2):
        assert not w.on_answer(number, 9.0)
    assert (w.num_strange, w.num_in_flight, w.waiting_since_s) == (2, 1, 0.0)
    w.check()


def test_who_is_forgotten_is_told_only_where_the_worker_may_know_it() -> None:
    """Guards: a table that grows in the worker, and words about requests it never saw."""
    w = window()
    w.forget(1)  # of a worker before this one
    w.open(2, PARAMS)
    w.forget(2)
    assert w.take(0.0) is None
    w.open(3, PARAMS)
    w.put(b"a")
    w.take(0.0)
    w.forget(3)
    assert w.take(0.0) == Work(2, (), (3,), ())


def test_a_retired_window_gives_back_what_was_never_answered() -> None:
    """Guards leases in a dead worker's unread outputs, which nobody would release."""
    w = window()
    for payload in (b"a", b"b", b"c", b"d"):
        w.put(payload)
        w.take(0.0)
    w.on_answer(1, 0.0)
    assert w.retire() == [b"b", b"c", b"d"]
    assert (w.num_in_flight, w.backlog_bytes, w.waiting_since_s) == (0, 0, None)


def test_a_bucket_is_restarted_until_its_workers_die_too_often() -> None:
    life = BucketLife(RestartBudget(2, 60.0))
    assert life.on_ready()
    assert life.on_death("a", 0.0) is Next.RESTART
    assert (life.state, life.incarnation) == (BucketState.STARTING, 2)
    assert life.on_death("b", 59.0) is Next.RESTART  # while it started
    assert life.on_ready()
    assert life.on_death("c", 60.0) is Next.RESTART  # the first is forgotten by now
    assert life.on_death("d", 61.0) is Next.IN_PROCESS
    assert life.on_death("e", 999.0) is Next.NOTHING
    assert not life.on_ready()
    assert (life.num_deaths, life.last_cause) == (4, "d")


def test_a_stopped_bucket_stays_stopped() -> None:
    life = BucketLife(RestartBudget(2, 60.0))
    life.stop()
    assert not life.on_ready()
    assert life.on_death("a", 0.0) is Next.NOTHING
    assert life.state is BucketState.STOPPED


@pytest.mark.parametrize(("slept_s", "is_overdue"), [(0.5, True), (60.0, False)])
def test_our_own_sleep_is_not_held_against_a_worker(slept_s: float, is_overdue: bool) -> None:
    """Guards: a laptop's suspend, or one long callback, that kills every worker."""
    watch = AnswerWatch(answer_s_max=3.0, period_s=0.5, looked_at_s=0.0)
    now_s = 0.0
    while now_s < 3.0:
        now_s += 0.5
        watch.look(now_s)
        assert not watch.is_overdue(0.0, now_s)
    now_s += slept_s
    watch.look(now_s)
    assert watch.is_overdue(0.0, now_s) is is_overdue
    assert not watch.is_overdue(None, now_s)
