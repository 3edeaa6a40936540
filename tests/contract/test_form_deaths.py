"""The death of its world, in every form: told once, to all, within the form's bound, for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import pytest

from executor.executor import GenerationExecutor, GenerationResult
from protos.errors import EngineDeadError
from tests.support.executor_forms import Form
from tests.support.executor_scripted import CRASH, EXIT, CharTokenizer, collect, config, request

pytestmark = pytest.mark.system
ENGINE = config(step_ms=1.0, num_blocks=30_000)
NUM_PENDING = 1000
NUM_RUNNING = ENGINE.scheduler.max_sequences
TIMES_ALLOWED = 5
"""A loaded machine is slow; virtual time holds the bounds exactly, elsewhere."""
IN_LOOP_S = 1.0
"""An exception in the engine's loop is said by the world itself, in every form."""


def pending(executor: GenerationExecutor, num: int = NUM_PENDING) -> list[GenerationResult]:
    asked = [request(f"p{i}", (i, i + 1), max_tokens=5000) for i in range(num)]
    return [executor.submit(each) for each in asked]


async def until_held(executor: GenerationExecutor, num: int) -> None:
    """Until the engine has so many requests."""
    async with asyncio.timeout(20):
        load = await executor.load()
        while load.num_queued + load.num_running < num:
            await asyncio.sleep(0.01)
            load = await executor.load()


async def pending_with(executor: GenerationExecutor, token_id: int) -> list[GenerationResult]:
    """The engine has them all, some stream, and one dies of this token: the next to run."""
    running = pending(executor, NUM_RUNNING)
    for result in running:
        await anext(result)
    results = [executor.submit(request("deadly", (1, token_id)))]
    await until_held(executor, NUM_RUNNING + 1)  # other lanes' are not to overtake it
    results += [
        executor.submit(request(f"w{i}", (i, i + 1), max_tokens=5000))
        for i in range(NUM_PENDING - NUM_RUNNING)
    ]
    await until_held(executor, NUM_PENDING + 1)
    executor.abort_request(running[0].client_id)  # gives its place away
    return running[1:] + results


async def assert_all_end(
    executor: GenerationExecutor, results: Sequence[GenerationResult], bound_s: float
) -> EngineDeadError:
    """Each by an EngineDeadError, in time and for ever; nothing is accepted any more."""
    async with asyncio.timeout(TIMES_ALLOWED * bound_s):
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        cause = await executor.wait_dead()
    assert [type(end) for end in ends] == [EngineDeadError] * len(results)
    assert {str(end) for end in ends} == {str(cause)}
    for result in results[:3]:
        for again in (anext(result), result.aresult()):
            with pytest.raises(EngineDeadError) as sticky:
                await again
            assert sticky.value is result.error
    with pytest.raises(EngineDeadError):
        executor.submit(request("late"))
    with pytest.raises(EngineDeadError):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        await executor.audit()
    return cause


async def test_a_killed_process_ends_all_that_is_pending(form: Form) -> None:
    """The last rank's; where there is one rank only, it is the leader's."""
    assert form.death_bound_s is not None
    async with form.open(ENGINE, tokenizer=CharTokenizer()) as executor:
        results = pending(executor)
        await anext(results[0])
        os.kill(executor.worker_pids[-1], signal.SIGKILL)
        await assert_all_end(executor, results, form.death_bound_s)


async def test_an_exit_without_a_word_ends_all_that_is_pending(form: Form) -> None:
    """As by the kernel when memory is out: nothing is closed, said or flushed."""
    assert form.death_bound_s is not None
    async with form.open(ENGINE, tokenizer=CharTokenizer()) as executor:
        results = await pending_with(executor, EXIT)
        await assert_all_end(executor, results, form.death_bound_s)


async def test_an_exception_in_the_loop_ends_all_that_is_pending(form: Form) -> None:
    """Guards: a cause that is not the world's own words, or is lost on the way."""
    async with form.open(ENGINE, tokenizer=CharTokenizer()) as executor:
        results = await pending_with(executor, CRASH)
        cause = await assert_all_end(executor, results, IN_LOOP_S)
        assert "scripted: the engine crashes" in str(cause)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < TIMES_ALLOWED * IN_LOOP_S  # a dead world's shutdown
