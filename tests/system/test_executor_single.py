"""The single-process form's own: what passes as it is, and ends that need no process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from executor.config import EngineConfig, ExecutorConfig
from executor.engine.local import Logits
from executor.health import HealthBounds
from executor.proxy import Proxy
from protos.errors import (
    ConfigError,
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    ServerUnavailableError,
)
from tests.support.engine_drive import engine_config
from tests.support.engine_models import (
    VOCAB_SIZE,
    prompt_of,
    reference_greedy,
    reference_logits,
    reference_model,
    save_checkpoint,
)
from tests.support.executor_scripted import HANG, collect, config, request, running, tokens

pytestmark = pytest.mark.system
SHORT_HEALTH: dict[str, Any] = {
    "health": HealthBounds(silence_s=0.3, stall_s=0.3, give_up_s=0.6),
    "heartbeat_s": 0.1,
    "stop_dead_s_max": 0.2,
}


def single(engine: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(engine, executor=ExecutorConfig(form="single"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made before anything is counted: torch and its companions keep threads."""
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference() -> Any:
    model = reference_model("llama")
    reference_greedy(model, prompt_of(30, seed=8), 2)
    return model


# --- what cannot cross a process ---------------------------------------------------


async def test_logits_and_processors_of_a_real_engine(checkpoint: Path, reference: Any) -> None:
    """Both kinds of logits against transformers, dropped unless asked for, counted in bytes;
    a processor's choice; a broken one ends its own request alone."""
    num_threads = torch.get_num_threads()
    prompt = tuple(prompt_of(30, seed=8))
    greedy = tuple(reference_greedy(reference, list(prompt), 6))

    def ban_first(token_ids: Sequence[int], logits: Logits) -> Logits:
        assert tuple(token_ids[: len(prompt)]) == prompt
        logits[greedy[0]] = -np.inf
        return logits

    def broken(token_ids: Sequence[int], logits: Logits) -> Logits:
        raise KeyError("no such key")

    def asked(external_id: str, **more: Any) -> Any:
        sampling = msgspec.structs.replace(
            request(max_tokens=6).sampling, temperature=0.0, ignore_eos=True
        )
        return msgspec.structs.replace(request(external_id, prompt), sampling=sampling, **more)

    engine = engine_config(checkpoint, prefill_chunk_tokens=11)
    async with running(single(engine)) as executor:
        plain = await executor.submit(asked("plain"))
        assert plain.token_ids == greedy
        assert plain.context_logits is plain.generation_logits is None
        assert (await executor.audit()).counters["proxy_logits_bytes"] == 0
        both = {"return_context_logits": True, "return_generation_logits": True}
        whole = await executor.submit(asked("logits", **both))
        expected = reference_logits(reference, [*prompt, *greedy[:-1]]).numpy()
        np.testing.assert_allclose(whole.context_logits, expected[: len(prompt)], atol=1e-3)
        np.testing.assert_allclose(whole.generation_logits, expected[len(prompt) - 1 :], atol=1e-3)
        num_rows = len(prompt) + len(greedy)
        counters = (await executor.audit()).counters
        assert counters["proxy_logits_bytes"] == num_rows * VOCAB_SIZE * 4
        failing = executor.submit(asked("broken", logits_processor=broken))
        banned = await executor.submit(asked("banned", logits_processor=ban_first))
        assert greedy[0] not in banned.token_ids
        with pytest.raises(RequestFailedError, match="no such key"):
            await failing
    torch.set_num_threads(num_threads)


# --- start -------------------------------------------------------------------------


async def test_a_warning_says_what_the_form_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="executor"):
        async with running(single(config())) as executor:
            assert (executor.form, executor.worker_pids) == ("single", ())
    chosen = [r.message for r in caplog.records if r.name == "executor.executor"]
    assert len(chosen) == 1
    assert "single process" in chosen[0]
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "GIL" in warning.message


async def test_a_failed_load_is_its_own_error() -> None:
    """The user's own mistake keeps its type; anything else is the engine's death."""
    with pytest.raises(ConfigError, match="there is no such disk"):
        async with running(single(config(load_error="there is no such disk"))):
            pass
    missing = EngineConfig(model="/nowhere/at/all")
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        async with running(single(missing)):
            pass


async def test_a_load_that_crashes_is_the_engines_death(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr("executor.single.create_engine", crash)
    with pytest.raises(EngineDeadError, match="OSError: the disk is on fire") as death:
        async with running(single(config())):
            pass
    assert "the end of its traceback" in str(death.value)


async def test_a_load_that_takes_too_long_is_left_behind_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards: an engine that comes up after all, and then serves nobody for ever."""
    with pytest.raises(EngineDeadError, match=r"load its model within 0\.1 s"):
        async with running(single(config(load_ms=600)), load_s_max=0.1, stop_dead_s_max=0.1):
            pass
    assert "left behind: the engine's thread, which still loads its model" in caplog.text


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"world": {"num_ranks": 2}}, "num_ranks"),
        ({"world": {"launcher": "mpi"}}, "launcher"),
        ({"postprocess_workers": 1}, "postprocess_workers"),
        ({"ray_address": "10.0.0.1:6379"}, "ray_address"),
    ],
)
def test_what_the_form_cannot_have_is_refused(more: dict[str, Any], field: str) -> None:
    """Guards: a setting that is accepted and then does nothing."""
    with pytest.raises(ConfigError, match=field):
        msgspec.convert({"form": "single", **more}, ExecutorConfig).check()


# --- hangs and ends ------------------------------------------------------------------


async def test_a_hung_loop_is_given_up_and_its_thread_told_as_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing kills a thread: what is open fails, the engine counts as dead, shutdown is
    bounded; and the thread ends by itself once it comes back."""
    engine = single(config(step_ms=1.0, hang_s=2.0))
    async with running(engine, **SHORT_HEALTH) as executor:
        results = [executor.submit(request(f"r{i}", max_tokens=5000)) for i in range(3)]
        await anext(results[0])
        results.append(executor.submit(request("h", (1, HANG))))
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert {type(end) for end in ends} == {ServerUnavailableError}
        cause = await asyncio.wait_for(executor.wait_dead(), 5)
        assert "a thread cannot be killed" in str(cause)
        with pytest.raises(EngineDeadError):
            executor.submit(request("late"))
        started_s = time.monotonic()
        await executor.shutdown()
        assert time.monotonic() - started_s < 5 * SHORT_HEALTH["stop_dead_s_max"]
    assert "left behind: the engine's thread, which still serves" in caplog.text
    assert [t for t in threading.enumerate() if t.name == "engine"]


async def test_a_full_inbox_refuses_and_a_cancel_still_gets_through() -> None:
    """Guards: an in-process queue without a bound, or a cancel that finds no room and is lost."""
    engine = single(config(step_ms=50.0))
    async with running(engine, queue_messages_max=4, stop_dead_s_max=2) as executor:
        first = executor.submit(request("first", max_tokens=20))
        await anext(first)
        taken = []
        with pytest.raises(OverloadedError):
            taken += [executor.submit(request(f"r{i}", max_tokens=20)) for i in range(100)]
        first.abort()
        with pytest.raises(Exception, match="cancelled"):
            await asyncio.wait_for(collect(first), 5)
        assert tokens(await collect(executor.submit(request("after")))) != ()


async def test_open_requests_end_with_a_shutdown_and_a_second_one_is_harmless() -> None:
    async with running(single(config(step_ms=1.0))) as executor:
        result = executor.submit(request(max_tokens=5000))
        await anext(result)
        threading.Thread(target=executor.pre_shutdown).start()
        with pytest.raises(ServerUnavailableError):
            await collect(result)
        await asyncio.gather(executor.shutdown(), executor.shutdown())
        await executor.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            executor.check_health()


async def test_a_crash_while_results_are_handled_ends_the_engine_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(single(config(step_ms=1.0))) as executor:
        assert isinstance(executor, Proxy)
        result = executor.submit(request(max_tokens=5000))
        await anext(result)
        monkeypatch.setattr(executor._requests, "on_outputs", lambda _: 1 / 0)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await collect(result)
