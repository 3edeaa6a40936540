"""When a worker counts as silent, stalled or lost: times in, words out."""

from __future__ import annotations

import pytest

from executor.config import EngineConfig, HealthConfig
from executor.health import HealthBounds, ProgressWatch
from executor.limits import ExecutorLimits
from protos.errors import ConfigError

BOUNDS = HealthBounds(silence_s=3.0, stall_s=10.0, give_up_s=30.0)


def watch() -> ProgressWatch:
    return ProgressWatch.start(BOUNDS, period_s=1.0, now_s=0.0)


def look_each_second(watched: ProgressWatch, from_s: int, to_s: int) -> str:
    """The last second's answer; each before it must be the same kind of answer."""
    answers = [watched.look(now_s) for now_s in range(from_s, to_s + 1)]
    assert len({bool(answer) for answer in answers}) == 1, answers
    return answers[-1]


def test_an_idle_loop_is_well_and_one_that_stands_under_work_is_stalled() -> None:
    """Guards: an idle loop called stuck, a stuck one called well, a long step called silence."""
    watched = watch()
    for now_s in range(1, 100):
        watched.on_heartbeat(now_s, progress=7, is_busy=False)
        assert not watched.look(now_s)
    watched.on_heartbeat(100, progress=8, is_busy=True)
    assert not watched.look(100)
    for now_s in range(101, 131):
        watched.on_heartbeat(now_s, progress=8, is_busy=True)
        assert bool(watched.look(now_s)) == (now_s > 110)
        assert not watched.is_given_up(now_s)
    assert "not advanced for 30.0 s under work (limit 10 s, health.stall_ms)" in watched.look(130)
    watched.on_heartbeat(131, progress=8, is_busy=True)
    assert watched.look(131)
    assert watched.is_given_up(131)
    watched.on_heartbeat(132, progress=9, is_busy=True)
    assert not watched.look(132)
    assert not watched.is_given_up(132)


def test_answers_show_that_the_loop_goes_on() -> None:
    """Bug: beside a frontend slower than the engine no heartbeat had room; its answers came
    without a pause, and after `stall_s` the worker was called stalled and all of them failed."""
    watched = watch()
    watched.on_heartbeat(1, progress=8, is_busy=True)
    for now_s in range(2, 40):
        watched.on_heard(now_s)
        watched.on_outputs()
        assert not watched.look(now_s)
    for now_s in range(40, 60):
        watched.on_heartbeat(now_s, progress=8, is_busy=True)
        assert bool(watched.look(now_s)) == (now_s > 49)


def test_silence_is_told_past_its_bound_and_given_up_past_the_last() -> None:
    watched = watch()
    assert not look_each_second(watched, 1, 3)
    assert "said nothing for 4.0 s (limit 3 s, health.silence_ms)" in watched.look(4)
    assert look_each_second(watched, 5, 30)
    assert not watched.is_given_up(30)
    assert watched.is_given_up(31)
    watched.on_heard(31)
    assert not watched.look(31)
    assert not watched.is_given_up(31)


def test_a_worker_that_was_stopped_in_a_step_is_not_stalled_when_it_goes_on() -> None:
    """Guards: the time for which it was stopped counted as a step without progress."""
    watched = watch()
    watched.on_heartbeat(1, progress=5, is_busy=True)
    for now_s in range(2, 26):
        watched.look(now_s)
    watched.on_heartbeat(25, progress=5, is_busy=True)
    assert not watched.look(25)
    assert not watched.is_given_up(25)


def test_our_own_sleep_is_not_the_workers_silence() -> None:
    """Guards: a server that was stopped and goes on, or had one long callback, kills its
    worker for words that wait unread in the socket."""
    watched = watch()
    assert not look_each_second(watched, 1, 2)
    assert not watched.look(100)
    assert not watched.is_given_up(100)
    assert "said nothing" in watched.look(101.5)


def test_short_standstills_of_ours_do_not_add_up_to_the_workers_silence() -> None:
    """Bug: only a look that came a whole period late was forgiven; three that were almost as
    late in a row made 5.7 s of "silence" out of words that lay unread in our socket."""
    watched = watch()
    for now_s in (1.9, 3.8, 5.7):
        assert not watched.look(now_s)
    assert "said nothing for 4.0 s" in watched.look(6.7)


def test_a_step_that_hangs_is_told_within_five_seconds_as_delivered() -> None:
    """Bug: a worker that was stopped was seen in 3 s, a step that stood still only after 10 s."""
    limits = ExecutorLimits.of(EngineConfig())
    assert 2 * limits.heartbeat_s + limits.health.stall_s < 5.0


def test_bounds_come_from_the_configuration_and_the_heart_beats_faster_than_they() -> None:
    limits = ExecutorLimits.of(
        EngineConfig(health=HealthConfig(silence_ms=600, stall_ms=2000, give_up_ms=5000))
    )
    assert limits.health == HealthBounds(silence_s=0.6, stall_s=2.0, give_up_s=5.0)
    assert limits.heartbeat_s == pytest.approx(0.2)
    assert ExecutorLimits.of(EngineConfig()) == ExecutorLimits(send_batch_s=0.001)


def test_a_worker_cannot_be_given_up_before_it_is_in_trouble() -> None:
    config = EngineConfig(health=HealthConfig(give_up_ms=4_000))
    with pytest.raises(ConfigError, match="give_up_ms") as refused:
        config.check("engine.")
    assert refused.value.field == "engine.health.give_up_ms"
