"""Control of a real worker: collective calls, profiles, sleep, LoRA books, listeners."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from executor.config import ExecutorConfig, WorldConfig
from executor.executor import GenerationExecutor
from protos.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotNowError,
    RequestCancelledError,
)
from tests.support.executor_scripted import (
    audited,
    collect,
    config,
    context_request,
    request,
    running,
    tokens,
)

pytestmark = pytest.mark.system
SLOW = config(step_ms=5.0)


@pytest.fixture
async def executor() -> AsyncIterator[GenerationExecutor]:
    async with running(SLOW) as executor:
        yield executor


async def test_a_collective_call_answers_with_plain_data_of_every_rank(
    executor: GenerationExecutor,
) -> None:
    (facts,) = await executor.collective_rpc("describe")
    assert (facts["rank"], facts["pid"]) == (0, executor.worker_pids[0])
    assert facts["rss_bytes"] > 0


async def test_what_cannot_be_called_is_refused_by_name(executor: GenerationExecutor) -> None:
    """Guards: any attribute of the engine callable from outside; an engine that dies of it."""
    for method, arguments, field in (
        ("step", {}, "method"),
        ("__class__", {}, "method"),
        ("load_lora", {"name": "a"}, "load_lora.path"),
        ("load_lora", {"name": 3, "path": "/x"}, "load_lora.name"),
        ("sleep", {"level": 2}, "sleep.level"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            await executor.collective_rpc(method, **arguments)
        assert refused.value.field == field
    with pytest.raises(InvalidRequestError, match="plain data"):
        await executor.collective_rpc("describe", what=object())
    assert tokens(await collect(executor.submit(request())))


async def test_sleep_is_refused_while_anything_is_held_and_wakes_to_the_same_tokens(
    executor: GenerationExecutor,
) -> None:
    before = tokens(await collect(executor.submit(request("a"))))
    running_one = executor.submit(request("b", max_tokens=1000))
    await anext(running_one)
    # Bug: the refusal named `sequence:5629499534213120`, which only the engine knows.
    with pytest.raises(NotNowError, match="needed by request 'b'"):
        await executor.sleep()
    running_one.abort()
    with pytest.raises(RequestCancelledError):
        await collect(running_one)
    finish = (await collect(executor.submit(context_request("c", (1, 2)))))[-1].finish
    assert finish is not None
    assert finish.context_phase_params is not None
    with pytest.raises(NotNowError, match="lease"):
        await executor.sleep()
    params = finish.context_phase_params
    assert await executor.release(params.disagg_request_id, params.pull_token)
    await executor.sleep()
    await executor.sleep()
    with pytest.raises(NotNowError, match="asleep"):
        await collect(executor.submit(request("d")))
    await executor.wake_up()
    assert tokens(await collect(executor.submit(request("a")))) == before
    await audited(executor)


async def test_a_profile_is_a_file_once_it_is_told(
    executor: GenerationExecutor, tmp_path: Path
) -> None:
    """Guards: an ack before the trace is whole; a second profile over the first."""
    path = tmp_path / "trace.json"
    with pytest.raises(NotNowError):
        await executor.stop_profile()
    with pytest.raises(InvalidRequestError):
        await executor.start_profile("relative.json")
    await executor.start_profile(str(path))
    with pytest.raises(NotNowError):
        await executor.start_profile(str(path))
    await collect(executor.submit(request(max_tokens=8)))
    (file,) = await executor.stop_profile()
    assert (file.path, file.num_bytes) == (str(path), path.stat().st_size)
    assert file.num_steps >= 8
    assert json.loads(path.read_text())["traceEvents"]


def traces(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("t*.json"))


async def test_every_rank_ends_a_profile_that_nobody_stops(tmp_path: Path) -> None:
    """Bug: the client of a profile was killed, and every later one was refused. All ranks idle,
    nobody asks: their files appear, a stop tells of them once, and a new one starts."""
    two = msgspec.structs.replace(
        SLOW, executor=ExecutorConfig(world=WorldConfig(launcher="spawn", num_ranks=2))
    )
    async with running(two) as executor:
        await executor.start_profile(str(tmp_path / "t.json"), 0.2)
        for _ in range(200):
            if len(traces(tmp_path)) == 2:
                break
            await asyncio.sleep(0.05)
        files = await executor.stop_profile()
        assert [Path(file.path).name for file in files] == ["t.json", "t.rank1.json"]
        await executor.start_profile(str(tmp_path / "next.json"), 60.0)
        with pytest.raises(NotNowError, match="ends by itself in"):
            await executor.start_profile(str(tmp_path / "other.json"))


async def test_lora_calls_pass_through_to_the_engines_books(executor: GenerationExecutor) -> None:
    await executor.load_lora("one", "/adapters/one")
    with pytest.raises(DuplicateRequestError):
        await executor.load_lora("one", "/adapters/other")
    assert [(lora.name, lora.path) for lora in await executor.list_loras()] == [
        ("one", "/adapters/one")
    ]
    await executor.unload_lora("one")
    with pytest.raises(ModelNotFoundError):
        await executor.unload_lora("one")


async def test_statistics_come_while_somebody_listens_and_are_built_for_nobody_else(
    executor: GenerationExecutor,
) -> None:
    await collect(executor.submit(request("unseen")))
    built = (await executor.audit()).counters["engine_stats_built"]
    assert built == 0
    with executor.subscribe_stats() as steps, executor.subscribe_stats() as second:
        await collect(executor.submit(request("seen", max_tokens=6)))
        indexes = [(await anext(steps)).step_index for _ in range(5)]
        assert [(await anext(second)).step_index for _ in range(5)] == indexes
        assert indexes == sorted(indexes)
    before = (await executor.audit()).counters["engine_stats_built"]
    assert before > 0
    await collect(executor.submit(request("unseen again")))
    assert (await executor.audit()).counters["engine_stats_built"] == before


async def test_a_listener_hears_of_the_death_after_what_it_had(
    executor: GenerationExecutor,
) -> None:
    steps = executor.subscribe_stats()
    await collect(executor.submit(request("x", max_tokens=3)))
    waiting = asyncio.ensure_future(_read_all(steps))
    os.kill(executor.worker_pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await waiting
    steps.close()


async def _read_all(steps: object) -> None:
    async for _ in steps:  # type: ignore[attr-defined]
        pass
