"""Control of an `LLM`'s engine from a synchronous program."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import LLM
from baton.llm_control import Listener
from executor.engine.control_seam import IterationStats
from protos.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotNowError,
    RequestCancelledError,
    ServerUnavailableError,
)
from tests.support.executor_baseline import nothing_left
from tests.support.llm_scripted import SEED, make_llm

pytestmark = pytest.mark.system


@pytest.fixture
def llm() -> Iterator[LLM]:
    with nothing_left(), make_llm() as llm:
        yield llm


def test_sleep_profile_and_lora(llm: LLM, tmp_path: Path) -> None:
    before = llm.generate("ab", max_tokens=5, seed=SEED).token_ids
    open_one = llm.generate_async("cd", max_tokens=8000, seed=SEED)
    next(iter(open_one))
    with pytest.raises(NotNowError):
        llm.sleep()
    open_one.abort()
    with pytest.raises(RequestCancelledError):
        open_one.result()
    llm.sleep()
    with pytest.raises(NotNowError):
        llm.generate("ab", max_tokens=5)
    llm.wake_up()
    path = tmp_path / "trace.json"
    llm.start_profile(str(path))
    assert llm.generate("ab", max_tokens=5, seed=SEED).token_ids == before
    (file,) = llm.stop_profile()
    assert file.path == str(path)
    assert json.loads(path.read_text())["traceEvents"]
    llm.load_lora("a", "/x")
    assert [lora.name for lora in llm.list_loras()] == ["a"]
    llm.unload_lora("a")
    with pytest.raises(InvalidRequestError, match="cannot be called"):
        llm.collective_rpc("fly")
    assert llm.collective_rpc("describe")[0]["rank"] == 0


def test_a_listener_gets_what_came_while_it_listened_and_then_the_death(llm: LLM) -> None:
    with llm.listen_stats() as steps:
        # the round that reads the wish to listen ends with a step, of nothing here
        assert all(step.num_running == step.num_finished == 0 for step in steps.take())
        llm.generate("ab", max_tokens=6, seed=SEED)
        taken = steps.take(timeout_s=5.0)
        indexes = [step.step_index for step in taken]
        assert indexes == sorted(set(indexes))
        assert any(step.num_decode_tokens for step in taken)
        os.kill(llm.collective_rpc("describe")[0]["pid"], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            take_for_ever(steps)


def test_a_listener_is_iterated_until_its_end_or_the_engines(llm: LLM) -> None:
    """Guards: a loop that never ends once nobody listens, or that hides the engine's death."""
    with llm.listen_stats() as steps:
        answer = llm.generate_async("ab", max_tokens=6, seed=SEED)
        assert next(step for step in steps if step.num_decode_tokens).num_running
        answer.result()
        steps.take()
    assert list(steps) == []
    with llm.listen_kv_events() as events:
        os.kill(llm.collective_rpc("describe")[0]["pid"], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            list(events)


def take_for_ever(steps: Listener[IterationStats]) -> None:
    while True:
        steps.take(timeout_s=5.0)


def test_after_the_end_every_call_says_so() -> None:
    with nothing_left():
        llm = make_llm()
        with llm.listen_kv_events() as events:
            llm.shutdown()
            with pytest.raises(ServerUnavailableError):
                events.take()
        with pytest.raises(ServerUnavailableError):
            llm.sleep()
