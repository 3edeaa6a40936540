"""Results on a loop of the test's own, read from it, from other loops and from plain threads."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from executor.engine.seam import EngineFinish
from executor.home import Home
from executor.result import GenerationResult, ResultChunk
from protos.completion import Completion, timing_of
from protos.errors import (
    BatonError,
    EngineDeadError,
    InvalidRequestError,
    RequestCancelledError,
    ServerUnavailableError,
    SlowConsumerError,
    WrongThreadError,
)
from protos.messages import FinishReason, KvStats, Usage

END = EngineFinish(reason=FinishReason.LENGTH, usage=Usage(prompt_tokens=1, completion_tokens=3))


def chunk(index: int, *, is_last: bool = False) -> ResultChunk:
    return ResultChunk(
        token_index=index,
        token_ids=(index,),
        text=chr(97 + index % 26),
        text_offset=index,
        finish=END if is_last else None,
    )


def make(**more: Any) -> GenerationResult:
    return GenerationResult(1, lambda _: None, **more)


def push(result: GenerationResult, num: int) -> None:
    for index in range(num):
        result.push(chunk(index, is_last=index == num - 1))


async def in_thread(call: Callable[[], Any]) -> Any:
    """Its own thread: the shared pool's must not be what a test counts on."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, call)


async def test_a_thread_streams_and_then_has_the_whole_as_often_as_it_asks() -> None:
    result = make()

    def read() -> tuple[list[ResultChunk], Completion, bool]:
        chunks = list(result)
        return chunks, result.result(), result.result() is result.result(1.0)

    reading = asyncio.create_task(in_thread(read))
    for index in range(3):
        await asyncio.sleep(0.01)
        result.push(chunk(index, is_last=index == 2))
    chunks, whole, is_same = await reading
    assert [item for piece in chunks for item in piece.token_ids] == [0, 1, 2]
    assert (whole.token_ids, whole.text) == ((0, 1, 2), "abc")
    assert (whole.finish_reason, whole.usage) == (FinishReason.LENGTH, END.usage)
    assert is_same
    assert await result is whole
    result.check()


async def test_the_whole_is_awaited_by_many_before_during_and_after_streaming() -> None:
    result = make()
    early = [asyncio.create_task(result.aresult()) for _ in range(2)]
    await asyncio.sleep(0)
    push(result, 3)
    streamed = [piece async for piece in result]
    assert streamed[0].token_ids == (0, 1, 2)
    wholes = [*await asyncio.gather(*early), await result, await result.aresult()]
    assert {whole.text for whole in wholes} == {"abc"}
    assert wholes[0].timing.total_ms >= wholes[0].timing.ttft_ms >= 0
    with pytest.raises(StopAsyncIteration):
        await anext(result)


async def test_an_error_is_the_same_object_for_everybody_for_ever() -> None:
    """Guards: an error that is raised once and is an endless wait after that; and one whose
    traceback grows with every raise."""
    result = make()
    error = EngineDeadError("gone")
    waiting = asyncio.create_task(result.aresult())
    await asyncio.sleep(0)
    result.push(chunk(0))
    result.fail(error)
    caught: list[BatonError] = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except BatonError as raised:
            caught.append(raised)

    for _ in range(2):
        for awaited in (waiting, result.aresult()):
            with pytest.raises(EngineDeadError) as raised:
                await awaited
            caught.append(raised.value)
        await in_thread(lambda: note(result.result))
    assert (await anext(result)).token_ids == (0,)  # what came before it is still read
    for _ in range(2):
        with pytest.raises(EngineDeadError) as raised:
            await anext(result)
        caught.append(raised.value)
        await in_thread(lambda: note(lambda: next(iter(result))))
    assert len(caught) == 10
    assert all(item is error for item in caught)
    assert len(traceback.extract_tb(error.__traceback__)) < 5


async def test_a_blocking_call_at_home_is_refused_and_not_a_deadlock() -> None:
    result = make()
    for call in (result.result, lambda: result.result(5), lambda: next(result)):
        with pytest.raises(WrongThreadError, match=r"await|async for"):
            call()
    push(result, 1)
    with pytest.raises(WrongThreadError):  # ended or not: the mistake shows at once
        result.result()
    assert (await result).token_ids == (0,)


async def test_one_batch_calls_another_loop_once_however_many_wait_there() -> None:
    """Guards: a self-pipe write and a thread switch for each of a step's tokens."""
    home = Home.here()
    results = [make(home=home) for _ in range(50)]
    are_waiting = threading.Event()

    async def elsewhere() -> list[int]:
        tasks = [asyncio.create_task(anext(result)) for result in results]
        await asyncio.sleep(0)
        are_waiting.set()
        return [(await task).token_ids[0] for task in tasks]

    reading = asyncio.create_task(in_thread(lambda: asyncio.run(elsewhere())))
    await asyncio.to_thread(are_waiting.wait)
    for index, result in enumerate(results):
        result.push(chunk(index))
    assert await reading == list(range(50))
    assert home.num_calls_elsewhere == 1


async def test_a_loop_that_was_closed_meanwhile_hurts_nobody() -> None:
    home = Home.here()
    result, other = make(home=home), make(home=home)
    waiting = asyncio.create_task(other.aresult())
    await asyncio.sleep(0)
    loop = asyncio.new_event_loop()
    result._waiters.append(loop.create_future())
    loop.close()
    push(result, 1)
    push(other, 1)
    assert (await waiting).token_ids == (0,)


async def test_what_nobody_reads_stays_one_chunk_and_few_objects() -> None:
    """Guards: a buffer that grows by an object per step where nobody reads."""
    result = make()
    push(result, 2000)
    result.check()
    assert result.num_merged == 1999
    pieces = [piece async for piece in result]
    assert len(pieces) == 1
    assert pieces[0].token_ids == tuple(range(2000))
    assert len(pieces[0].text) == 2000
    assert (await result).token_ids == pieces[0].token_ids
    result.check()


async def test_a_consumer_too_far_behind_loses_its_own_request() -> None:
    aborted: list[int] = []
    result = GenerationResult(7, aborted.append, max_unread_tokens=2)
    for index in range(6):
        result.push(chunk(index))
    assert aborted == [7]  # once
    result.fail(RequestCancelledError("cancelled"))
    assert (await anext(result)).token_ids == (0, 1, 2, 3, 4, 5)
    for _ in range(2):
        with pytest.raises(SlowConsumerError, match="max_unread_tokens is 2") as raised:
            await anext(result)
    assert (raised.value.value, raised.value.limit) == ("3", "2")


async def test_who_reads_in_time_or_awaits_the_whole_is_not_too_slow() -> None:
    aborted: list[int] = []
    read = GenerationResult(1, aborted.append, max_unread_tokens=2)
    whole = GenerationResult(2, aborted.append, max_unread_tokens=2)
    waiting = asyncio.create_task(whole.aresult())
    await asyncio.sleep(0)
    for index in range(6):
        read.push(chunk(index, is_last=index == 5))
        whole.push(chunk(index, is_last=index == 5))
        await anext(read)
    assert len((await waiting).token_ids) == 6
    assert aborted == []


async def test_a_timeout_ends_the_waiting_and_not_the_request() -> None:
    result = make()

    def wait() -> Completion:
        with pytest.raises(TimeoutError):
            result.result(0.01)
        return result.result(5)

    waiting = asyncio.create_task(in_thread(wait))
    await asyncio.sleep(0.05)
    push(result, 1)
    assert (await waiting).token_ids == (0,)
    result.check()


async def test_a_timeout_that_is_no_time_is_refused_and_one_too_far_away_is_none() -> None:
    """`nan` is never reached and never over: the wait went round and round, and held a core."""
    result = make()

    def wait() -> Completion:
        for bad in (float("nan"), "soon"):
            with pytest.raises(InvalidRequestError, match="timeout_s"):
                result.result(bad)  # type: ignore[arg-type]
        return result.result(10**400)

    waiting = asyncio.create_task(in_thread(wait))
    await asyncio.sleep(0.05)
    push(result, 1)
    assert (await waiting).token_ids == (0,)


async def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    result = make()
    first = asyncio.create_task(result.aresult())
    second = asyncio.create_task(result.aresult())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    push(result, 1)
    assert (await second).token_ids == (0,)
    result.check()


async def test_a_thread_does_not_wait_for_a_home_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards: a wait without end where the executor's thread died without a word; and a new
    thread that is taken for the dead one, since it was given the same number."""
    monkeypatch.setattr("executor.result.LOOK_S", 0.01)
    made: list[GenerationResult] = []
    home = threading.Thread(target=lambda: made.append(make()))
    home.start()
    home.join()
    for call in (made[0].result, lambda: next(made[0])):
        with pytest.raises(ServerUnavailableError, match="ended"):
            await in_thread(call)


async def test_a_result_that_was_handed_out_before_takes_over_the_name() -> None:
    aborted: list[int] = []
    ended: list[GenerationResult] = []
    outer = GenerationResult(0, lambda _: None)
    outer.on_end = ended.append
    inner = GenerationResult(9, aborted.append)
    inner.pass_on_to(outer)
    outer.abort()
    await asyncio.sleep(0)
    assert aborted == [9]
    assert outer.client_id == 9
    push(inner, 2)
    assert inner.is_ended
    assert ended == [outer]
    assert (await outer).token_ids == (0, 1)


async def test_an_abort_happens_at_home_in_a_turn_of_its_own() -> None:
    """At home it happened on the spot: called by a finalizer, in the midst of anything."""
    threads: list[int] = []
    result = GenerationResult(1, lambda _: threads.append(threading.get_ident()))
    result.abort()
    assert threads == []
    await in_thread(result.abort)
    await asyncio.sleep(0)
    assert threads == [threading.get_ident()] * 2


def test_nobody_waits_for_a_loop_that_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an executor's loop ended without a shutdown while its thread lived on; threads and
    other loops waited for ever, and a new loop on that thread met asyncio's own RuntimeError."""
    monkeypatch.setattr("executor.result.LOOK_S", 0.01)

    async def made() -> GenerationResult:
        return make()

    result = asyncio.run(made())

    async def read_elsewhere(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(ServerUnavailableError, match="ended"):
            await call()

    for call in (result.aresult, lambda: anext(result)):
        asyncio.run(read_elsewhere(call))
    thread = threading.Thread(target=lambda: asyncio.run(read_elsewhere(result.aresult)))
    thread.start()
    thread.join()
    with pytest.raises(ServerUnavailableError, match="ended"):
        asyncio.run(in_thread(result.result))
    result.check()


def test_a_completion_is_shown_on_a_line_or_two() -> None:
    """Bug: `print(completion)` in a notebook showed every token of a long prompt."""
    done = Completion(
        text="a b",
        token_ids=(5, 6),
        finish_reason=FinishReason.STOP,
        usage=Usage(),
        kv=KvStats(),
        timing=timing_of(started_s=0.0, first_token_s=1.0, last_token_s=2.0, num_tokens=2),
        external_id="x",
        seed=7,
        prompt_token_ids=tuple(range(100_000)),
    )
    shown = repr(done)
    assert "token_ids=(5, 6), finish" in shown
    assert "prompt_token_ids=(0, 1, 2, 3, 4, 5, 6, 7, ... 100000 in all)" in shown
    assert "context_logits" not in shown
    assert len(shown) < 1500
