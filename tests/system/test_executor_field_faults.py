"""What users of other systems met at this boundary, asked of ours (docs/faults.md)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from executor.executor import GenerationExecutor, GenerationResult
from protos.errors import (
    BatonError,
    DeadlineExceededError,
    DuplicateRequestError,
    EngineDeadError,
    RequestCancelledError,
    RequestFailedError,
)
from tests.support.executor_forms import FORMS
from tests.support.executor_scripted import (
    CONTRACT,
    CRASH,
    REFUSE,
    CharTokenizer,
    audited,
    collect,
    config,
    context_request,
    expected,
    request,
    running,
    tokens,
)

pytestmark = pytest.mark.system
SLOW = config(step_ms=5.0)
ALLOWANCE = 5
DEATH_S = 1.0
"""From a death on this host to the last answer."""
IDLE_SHARE, IDLE_S = 0.01, 1.0
"""Of one processor, with nothing to do."""


async def error_of(result: GenerationResult) -> BatonError:
    with pytest.raises(BatonError) as raised:
        await collect(result)
    return raised.value


async def test_a_killed_worker_is_dead_for_good_and_not_merely_unwell() -> None:
    """F10: one process of the engine was killed; the server stayed up and answered 503 for
    ever. What makes a server exit is `wait_dead`; what a client reads is no "try again here"."""
    async with running(SLOW) as executor:
        pending = executor.submit(request(max_tokens=1000))
        await anext(pending)
        watch = asyncio.create_task(executor.wait_dead())
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        cause = await asyncio.wait_for(watch, ALLOWANCE * DEATH_S)
        assert isinstance(cause, EngineDeadError)
        assert await error_of(pending) is cause
        for _ in range(3):
            with pytest.raises(EngineDeadError):
                executor.check_health()
            await asyncio.sleep(0.05)
        assert await executor.wait_dead() is cause


async def test_the_first_cause_is_what_everybody_reads() -> None:
    """F11: the real error was hidden behind a later one. Here the engine's own exception is
    followed by a SIGKILL of what is left of its process, and by a shutdown."""
    async with running(SLOW) as executor:
        pid = executor.worker_pids[0]
        others = [executor.submit(request(f"o{i}", max_tokens=1000)) for i in range(3)]
        await anext(others[0])
        culprit = executor.submit(request("culprit", (1, CRASH)))
        first = await error_of(culprit)
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
        assert "the engine crashes in this step" in first.message
        assert {id(await error_of(other)) for other in others} == {id(first)}
        assert await executor.wait_dead() is first
        await executor.shutdown()
        for use in (lambda: executor.submit(request("late")), executor.check_health):
            with pytest.raises(EngineDeadError) as raised:
                use()
            assert raised.value is first


async def executions(executor: GenerationExecutor) -> int:
    return (await executor.audit()).counters["engine_submitted"]


async def test_every_retry_is_one_execution_with_an_id_of_its_own() -> None:
    """F11: ids collided when a request was tried again, and the retry got the answer of the
    try before it. Tried again after each kind of end, under one external id."""
    async with running(CONTRACT, deadline_grace_s=1.0) as executor:
        first = executor.submit(request("same", (1, REFUSE)))
        assert isinstance(await error_of(first), RequestFailedError)
        assert await executions(executor) == 0
        second = executor.submit(request("same", (5, 5), max_tokens=5000, deadline_s=0.05))
        assert isinstance(await error_of(second), DeadlineExceededError)
        third = executor.submit(request("same", (6, 6), max_tokens=5000))
        await anext(third)
        third.abort()
        assert isinstance(await error_of(third), RequestCancelledError)
        fourth = executor.submit(request("same", (7, 7), max_tokens=6))
        assert tokens(await collect(fourth)) == expected((7, 7), 6)
        ids = [result.client_id for result in (first, second, third, fourth)]
        assert len(set(ids)) == 4
        assert await executions(executor) == 3
        audit = await audited(executor)
        assert audit.counters["worker_registered"] == 4


async def test_a_hand_off_tried_again_needs_a_new_attempt() -> None:
    """F11: a retry under the old attempt's id would mix its KV up with that of the first."""
    async with running(CONTRACT) as executor:
        prompt = tuple(range(40))
        first = (await collect(executor.submit(context_request("c", prompt, attempt=1))))[-1]
        again = executor.submit(context_request("c", prompt, attempt=1))
        assert isinstance(await error_of(again), DuplicateRequestError)
        second = (await collect(executor.submit(context_request("c", prompt, attempt=2))))[-1]
        assert await executions(executor) == 2
        for chunk in (first, second):
            assert chunk.finish is not None
            params = chunk.finish.context_phase_params
            assert params is not None
            assert await executor.release(params.disagg_request_id, params.pull_token)


def busy_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize("form", ["single", "ipc", "ipc-post2", "spawn2", "attach3"])
async def test_idle_after_traffic_means_near_zero_cpu(form: str) -> None:
    """F16: what was only waiting for its KV to be fetched counted as running, and an engine
    with nothing to do spun. A lease stays open here, and its end is still some seconds off."""
    engine = config(lease_ms=20_000)
    async with FORMS[form].open(engine, tokenizer=CharTokenizer()) as executor:
        results = [executor.submit(request(f"r{i}", max_tokens=50)) for i in range(100)]
        await asyncio.gather(*map(collect, results))
        await collect(executor.submit(context_request("c", tuple(range(40)))))
        assert (await audited(executor)).blocks_by_owner["lease"] == 3
        await asyncio.sleep(0.1)
        children = psutil.Process().children(recursive=True)
        pids = (os.getpid(), *(child.pid for child in children))
        assert set(executor.worker_pids) <= set(pids)
        before, began_s = [busy_s(pid) for pid in pids], time.monotonic()
        await asyncio.sleep(IDLE_S)
        bound_s = ALLOWANCE * IDLE_SHARE * (time.monotonic() - began_s)
        used = {pid: busy_s(pid) - used_s for pid, used_s in zip(pids, before, strict=True)}
        assert max(used.values()) <= bound_s, used
        assert (await audited(executor)).blocks_by_owner["lease"] == 3
