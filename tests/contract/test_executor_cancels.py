"""A cancel in every state a request can be in: one answer, and everything it held is free.

Every test runs inside `one_answer_each`, which compares the books of both sides
and the engine's blocks before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable

import pytest

from executor.executor import GenerationExecutor, GenerationResult
from protos.errors import BatonError, RequestCancelledError
from protos.messages import LedgerAudit
from tests.support.executor_scripted import (
    CONTRACT,
    audited,
    collect,
    context_request,
    expected,
    request,
    tokens,
)

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]
ENDS = ("finished", "cancelled", "failed")
TRIES, AT_ONCE = 1000, 20
LONG = 5000


def ended(audit: LedgerAudit, side: str) -> dict[str, int]:
    return {how: audit.counters[f"{side}_{how}"] for how in ENDS}


def gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@contextlib.asynccontextmanager
async def one_answer_each(executor: GenerationExecutor, **ends: int) -> AsyncIterator[None]:
    """`ends` are the ends that the proxy's ledger must have counted, and no others."""
    before = await audited(executor)
    yield
    after = await audited(executor)
    assert gained(ended(before, "proxy"), ended(after, "proxy")) == ends
    for side in ("proxy", "worker"):
        num_ended = sum(gained(ended(before, side), ended(after, side)).values())
        registered = f"{side}_registered"
        assert num_ended == after.counters[registered] - before.counters[registered]
    assert after.blocks_by_state == before.blocks_by_state
    assert after.holders == before.holders == {}


async def end_of(
    result: GenerationResult,
    prompt: tuple[int, ...],
    max_tokens: int,
    *,
    aborts_after_first: bool = False,
) -> str:
    """How it ended, once read to the end and once more: an end stays what it is."""
    chunks = []
    error: BatonError | None = None
    try:
        async for chunk in result:
            chunks.append(chunk)
            if aborts_after_first:
                result.abort()
    except RequestCancelledError as first:
        error = first
    with pytest.raises(type(error) if error else StopAsyncIteration) as again:
        await anext(result)
    if error is not None:
        assert again.value is error
        assert tokens(chunks) == expected(prompt, len(tokens(chunks)))
        return "cancelled"
    assert [chunk.finish is not None for chunk in chunks].count(True) == 1
    assert tokens(chunks) == expected(prompt, max_tokens)
    return "finished"


async def cancelled(results: Iterable[GenerationResult]) -> None:
    for result in results:
        assert await end_of(result, (1, 2, 3), LONG) == "cancelled"


async def test_at_once(executor: GenerationExecutor) -> None:
    """Guards a cancel that overtakes its request, or is lost because nothing runs yet."""
    async with one_answer_each(executor, cancelled=1):
        result = executor.submit(request(max_tokens=LONG))
        result.abort()
        await cancelled([result])


async def until_load(executor: GenerationExecutor, num_running: int, num_queued: int) -> None:
    """Requests that go by different lanes arrive in any order."""
    async with asyncio.timeout(5):
        while True:
            load = await executor.load()
            if (load.num_running, load.num_queued) == (num_running, num_queued):
                return


async def test_queued(executor: GenerationExecutor) -> None:
    """Guards: a waiting request that a cancel only marks, and that still runs later."""
    num_running = CONTRACT.scheduler.max_sequences
    async with one_answer_each(executor, cancelled=num_running + 1):
        runners = [executor.submit(request(f"r{i}", max_tokens=1500)) for i in range(num_running)]
        await until_load(executor, num_running, 0)
        queued = executor.submit(request("q", max_tokens=LONG))
        await until_load(executor, num_running, 1)
        queued.abort()
        await cancelled([queued])
        await until_load(executor, num_running, 0)
        for runner in runners:
            runner.abort()
        for runner in runners:
            with pytest.raises(RequestCancelledError):
                await collect(runner)


async def test_running_and_its_external_id_is_free_again(executor: GenerationExecutor) -> None:
    async with one_answer_each(executor, cancelled=1, finished=1):
        first = executor.submit(request("same", max_tokens=LONG))
        await anext(first)
        first.abort()
        with pytest.raises(RequestCancelledError):
            await collect(first)
        assert executor.find("same") is None
        second = executor.submit(request("same"))
        assert second.client_id != first.client_id
        assert tokens(await collect(second)) == expected((1, 2, 3), 4)


async def test_twice_by_the_result_and_by_its_id(executor: GenerationExecutor) -> None:
    """Guards a second cancel that is taken for a second request's, or answers again."""
    async with one_answer_each(executor, cancelled=1):
        result = executor.submit(request(max_tokens=LONG))
        await anext(result)
        result.abort()
        executor.abort_request(result.client_id)
        with pytest.raises(RequestCancelledError):
            await collect(result)
        result.abort()


async def test_unknown_and_never_minted_ids(executor: GenerationExecutor) -> None:
    """Guards: an id from nowhere that kills a loop, or refuses a request that comes later."""
    before = await audited(executor)
    async with one_answer_each(executor, finished=1):
        for client_id in (0, 12345 << 16, (1 << 63) - 1, -1):
            executor.abort_request(client_id)
        assert tokens(await collect(executor.submit(request()))) == expected((1, 2, 3), 4)
    after = await audited(executor)
    assert after.counters["proxy_unknown"] == before.counters["proxy_unknown"] + 4
    executor.check_health()


async def test_after_the_end(executor: GenerationExecutor) -> None:
    before = await audited(executor)
    async with one_answer_each(executor, finished=1):
        result = executor.submit(request())
        chunks = await collect(result)
        result.abort()
        assert chunks[-1].finish is not None
        assert tokens(chunks) == expected((1, 2, 3), 4)
        with pytest.raises(StopAsyncIteration):
            await anext(result)
    after = await audited(executor)
    assert after.counters["proxy_late"] == before.counters["proxy_late"] + 1


async def test_a_context_phase_leaves_no_lease(executor: GenerationExecutor) -> None:
    """Guards KV pinned for a request that was cancelled before, or while, its prefill ended:
    whichever came first, the lease is told to the reader or is gone. Another request keeps
    the engine stepping, so that a cancel may come while its request still waits."""
    other = executor.submit(request("other", max_tokens=LONG))
    ends: Counter[str] = Counter()
    for number in range(40):
        result = executor.submit(context_request("c", tuple(range(40)), attempt=100 + number))
        if number % 2:
            await asyncio.sleep(0.00005 * number)
        result.abort()
        try:
            finish = (await collect(result))[-1].finish
        except RequestCancelledError:
            ends["cancelled"] += 1
            continue
        ends["finished"] += 1
        assert finish is not None
        assert finish.context_phase_params is not None
        params = finish.context_phase_params
        assert await executor.release(params.disagg_request_id, params.pull_token)
    other.abort()
    await cancelled([other])
    assert ends["finished"] + ends["cancelled"] == 40
    assert min(ends["finished"], ends["cancelled"]) > 0, "no race"
    assert (await audited(executor)).holders == {}


async def race(executor: GenerationExecutor, number: int) -> str:
    """Two tokens, a step each. The cancel leaves when the first is read, so that it meets the
    step of the second; or, every other time, at any moment of the request's life."""
    prompt = (number, 1)
    result = executor.submit(request(f"e{number}", prompt, max_tokens=2))
    if number % 2:
        return await end_of(result, prompt, 2, aborts_after_first=True)
    asyncio.get_running_loop().call_later(0.0003 * (number % 18), result.abort)
    return await end_of(result, prompt, 2)


async def test_in_the_last_step_a_thousand_times(executor: GenerationExecutor) -> None:
    """Guards: no answer, or two, where the cancel meets the last step."""
    before = await audited(executor)
    ends: Counter[str] = Counter()
    for first in range(0, TRIES, AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        ends.update(await asyncio.gather(*(race(executor, number) for number in numbers)))
    assert ends["finished"] + ends["cancelled"] == TRIES
    assert min(ends["finished"], ends["cancelled"]) > TRIES // 20, "no race"
    after = await audited(executor)
    assert gained(ended(before, "proxy"), ended(after, "proxy")) == dict(ends)
    assert gained(ended(before, "worker"), ended(after, "worker")) == dict(ends)
    assert after.blocks_by_state == before.blocks_by_state
    assert after.holders == {}
