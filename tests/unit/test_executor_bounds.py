"""How soon a death and a hang are told, exactly: real links on virtual time.

Over real processes (tests/contract/test_form_deaths.py, tests/system/test_executor_silence.py) a
loaded machine makes every bound soft. Here nothing but the code itself can take time.
"""

from __future__ import annotations

import pytest

from executor.messages import Heartbeat
from executor.result import GenerationResult
from protos.errors import EngineDeadError, ServerUnavailableError
from tests.support.executor_scripted import request
from tests.support.link_rigs import LIMITS, NAMES, STEP_S, Rig, opened

DEATH_S, HANG_S = 1.0, 5.0
"""As README states them."""
NUM_PENDING = 20
TINY_S = 1e-6
ONE_OF_EACH = ("ipc: its pid", "ray: its pid", "attach: its pid", "rpc elsewhere: the owner tells")


def pending(rig: Rig) -> list[GenerationResult]:
    asked = [request(f"r{i}", deadline_s=600.0) for i in range(NUM_PENDING)]
    return [rig.loop.do(rig.proxy.submit, each) for each in asked]


def are_told(results: list[GenerationResult], kind: type[Exception]) -> bool:
    """All or none: nobody waits behind another."""
    errors = [result.error for result in results]
    assert len(set(map(id, errors))) == 1
    assert errors[0] is None or type(errors[0]) is kind
    return errors[0] is not None


@pytest.mark.parametrize("name", NAMES)
def test_from_the_sight_of_a_death_to_the_answers_there_is_the_wait_for_last_words_only(
    name: str,
) -> None:
    with opened(name) as rig:
        results = pending(rig)
        rig.see_death()
        rig.loop.settle()
        if rig.bound_s:
            rig.loop.pass_time(rig.bound_s - TINY_S)
            assert not are_told(results, EngineDeadError)
            rig.loop.pass_time(2 * TINY_S)
        assert are_told(results, EngineDeadError)
        assert rig.bound_s < DEATH_S


def test_an_owners_word_ends_the_wait_for_it() -> None:
    """Guards: a cause that is there, and waited for all the same."""
    with opened("attach: its pid") as rig:
        results = pending(rig)
        rig.see_death()
        rig.loop.pass_time(0.1)
        assert not are_told(results, EngineDeadError)
        rig.loop.do(rig.link._caller.tell_end)
        assert are_told(results, EngineDeadError)
        assert "the owner says" in str(results[0].error)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("beat_phase_s", [0.0, 0.1, 0.2, 0.3, 0.35])
@pytest.mark.parametrize("trouble", ["silent", "stalled"])
def test_a_hang_is_told_within_five_seconds_of_the_last_sign_of_progress(
    name: str, beat_phase_s: float, trouble: str
) -> None:
    """Wherever the beats lie between the looks. The worst case: the loop's last round comes right
    behind a beat, so that the next one still tells of progress."""
    with opened(name) as rig:
        results = pending(rig)
        stands_at_s = rig.loop.now_s + 2.0 + beat_phase_s
        beats_at_s = rig.loop.now_s + beat_phase_s
        progress = 0
        while not are_told(results, ServerUnavailableError):
            now_s = rig.loop.now_s
            assert now_s <= stands_at_s + HANG_S
            if now_s >= beats_at_s - TINY_S and not (
                trouble == "silent" and now_s > stands_at_s + TINY_S
            ):
                progress += now_s <= stands_at_s + LIMITS.heartbeat_s + TINY_S
                rig.loop.do(rig.proxy.on_messages, [Heartbeat(progress, is_busy=True)])
                beats_at_s += LIMITS.heartbeat_s
            rig.loop.pass_time(STEP_S)
        health = LIMITS.health
        least_s = health.silence_s if trouble == "silent" else health.stall_s
        assert least_s <= rig.loop.now_s - stands_at_s <= HANG_S
        assert ("said nothing" if trouble == "silent" else "not advanced") in str(results[0].error)
