"""A worker that is stopped or stands still: told within its bound, survived, or given up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from executor.executor import GenerationExecutor
from executor.health import HealthBounds
from executor.owned_link import OwnedLink
from executor.proxy import Proxy
from protos.errors import EngineDeadError, ServerUnavailableError
from tests.support.executor_scripted import (
    HANG,
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
ALLOWANCE = 5
SILENCE_S, HEARTBEAT_S = 0.6, 0.1
PATIENT: dict[str, Any] = {
    "heartbeat_s": HEARTBEAT_S,
    "stop_live_s_max": 0.5,
    "stop_dead_s_max": 0.5,
    "health": HealthBounds(silence_s=SILENCE_S, stall_s=1.0, give_up_s=60.0),
}
HASTY = PATIENT | {"health": HealthBounds(silence_s=0.4, stall_s=0.5, give_up_s=1.0)}


async def until_well(executor: GenerationExecutor) -> None:
    async with asyncio.timeout(5):
        while True:
            try:
                executor.check_health()
            except ServerUnavailableError:
                await asyncio.sleep(0.02)
            else:
                return


async def test_a_stopped_worker_costs_the_open_requests_and_is_well_again_after() -> None:
    """Guards streams that hang until their deadline, 600 s by default, on a worker that was
    stopped; and what they held being kept, or answered twice, once it goes on."""
    async with running(SLOW, **PATIENT) as executor:
        pid = executor.worker_pids[0]
        expected = tokens(await collect(executor.submit(request("r"))))
        results = [executor.submit(request(f"r{i}", max_tokens=2000)) for i in range(8)]
        results.append(executor.submit(context_request("c", tuple(range(40)))))
        await anext(results[0])
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        load = asyncio.ensure_future(executor.load())
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert time.monotonic() - stopped_s < ALLOWANCE * (SILENCE_S + HEARTBEAT_S)
        told = [end for end in ends if isinstance(end, ServerUnavailableError)]
        assert len(told) >= 8  # the context request may have finished before
        assert not isinstance(told[0], EngineDeadError)
        assert f"(process {pid}) has said nothing for" in told[0].message
        assert "(limit 0.6 s, health.silence_ms)" in told[0].message
        for refused in (executor.check_health, lambda: executor.submit(request("new"))):
            with pytest.raises(ServerUnavailableError, match="said nothing for"):
                refused()
        with pytest.raises(ServerUnavailableError, match="said nothing for"):
            await load
        os.kill(pid, signal.SIGCONT)
        await until_well(executor)
        assert tokens(await collect(executor.submit(request("r0")))) == expected
        audit = await audited(executor)
        assert audit.counters["worker_cancelled"] >= 8
        assert audit.counters["proxy_late"] + audit.counters["proxy_duplicate"] > 0
        assert executor.worker_pids == (pid,)


async def test_a_standing_loop_is_stalled_though_its_heart_beats() -> None:
    """Guards: heartbeats from a side thread that hide a loop stuck in a step."""
    async with running(config(hang_s=3.0), **PATIENT) as executor:
        began_s = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=r"not advanced .* under work"):
            await collect(executor.submit(request("x", (1, HANG))))
        assert time.monotonic() - began_s < ALLOWANCE * 1.0
        with pytest.raises(ServerUnavailableError, match="not advanced"):
            executor.submit(request("y"))
        await until_well(executor)
        assert tokens(await collect(executor.submit(request("y"))))
        await audited(executor)


STATED_S = 5.0


async def told_by_default(trouble: str) -> None:
    """As delivered: no bound of this executor is a test's."""
    executor = await GenerationExecutor.create(config(step_ms=5.0, hang_s=60.0), name=trouble)
    try:
        pending = [executor.submit(request("r", max_tokens=2000))]
        await anext(pending[0])
        began_s = time.monotonic()
        prompt = (1, HANG) if trouble == "stalled" else (1,)
        pending += [executor.submit(request(f"r{i}", prompt, max_tokens=2000)) for i in range(999)]
        if trouble == "silent":
            os.kill(executor.worker_pids[0], signal.SIGSTOP)
        ends = await asyncio.gather(*map(collect, pending), return_exceptions=True)
        assert time.monotonic() - began_s < ALLOWANCE * STATED_S
        assert {type(end) for end in ends} == {ServerUnavailableError}
    finally:
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        await executor.shutdown()


async def test_a_hang_is_told_within_its_bound_as_delivered() -> None:
    """Guards the default bounds, which every other test makes small."""
    await asyncio.gather(told_by_default("silent"), told_by_default("stalled"))


@pytest.mark.parametrize("trouble", ["silent", "stalled"])
async def test_a_worker_that_does_not_come_back_is_killed_and_dead(trouble: str) -> None:
    """Guards F10: a server that stays up and answers UNAVAILABLE for ever."""
    async with running(**HASTY) as executor:
        began_s = time.monotonic()
        if trouble == "silent":
            os.kill(executor.worker_pids[0], signal.SIGSTOP)
            story = "has said nothing for .* was killed .health.give_up_ms is 1000"
        else:
            with pytest.raises(ServerUnavailableError):
                await collect(executor.submit(request("x", (1, HANG))))
            story = "has not advanced for .* was killed .health.give_up_ms is 1000"
        error = await asyncio.wait_for(executor.wait_dead(), ALLOWANCE * 2)
        assert time.monotonic() - began_s >= 1.0
        with pytest.raises(EngineDeadError, match=story):
            raise error
        with pytest.raises(EngineDeadError):
            executor.check_health()


async def test_a_worker_that_not_even_sigkill_ends_is_dead_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards a server that waits for ever for a process in uninterruptible sleep."""
    async with running(**HASTY) as executor:
        assert isinstance(executor, Proxy)
        assert isinstance(executor._link, OwnedLink)
        os.kill(executor.worker_pids[0], signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(executor._link.world, "kill", lambda: None)
            error = await asyncio.wait_for(executor.wait_dead(), ALLOWANCE * 2)
        assert "was killed (health.give_up_ms is 1000)" in error.message
        assert executor.worker_pids


async def test_a_stopped_worker_does_not_outlive_a_shutdown() -> None:
    async with running(SLOW, **PATIENT) as executor:
        result = executor.submit(request("x", max_tokens=1000))
        os.kill(executor.worker_pids[0], signal.SIGSTOP)
        await executor.shutdown()
        with pytest.raises(ServerUnavailableError, match="shutting down"):
            await collect(result)


def wait_without_the_loop(executor: Proxy) -> None:
    """Until the worker is gone; the loop does not turn, so the proxy is told of nothing."""
    give_up_s = time.monotonic() + 10
    while executor._link.requests.is_connected() or not executor._link.has_exited():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


async def test_a_request_that_registers_on_a_dead_worker_hears_of_the_death() -> None:
    """Guards invariant 2: without a second look after registering, the queue of a worker
    that has just died looks full, and the client is told to come back later."""
    async with running() as executor:
        assert isinstance(executor, Proxy)
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        wait_without_the_loop(executor)
        with pytest.raises(EngineDeadError, match="has just died"):
            executor.submit(request("late"))
        assert executor.find("late") is None
        assert "SIGKILL" in (await executor.wait_dead()).message
