"""Real postprocess workers without an engine: traffic, deaths, hangs, starts that fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from executor.engine.seam import EngineFinish, EngineOutput
from executor.limits import ExecutorLimits
from executor.post.limits import PostLimits
from executor.post.messages import Answer, PostChunk, pack_outputs
from executor.post.pool import PostPool
from executor.post.spec import TokenizerSpec
from executor.postprocess import text_params
from protos.errors import BatonError, ConfigError, EngineDeadError, PostprocessError
from protos.messages import FinishReason, Usage
from tests.support.executor_scripted import CharTokenizer, request

pytestmark = pytest.mark.system
TOY = TokenizerSpec(factory="tests.support.executor_scripted:CharTokenizer")
DEATH_S_MAX = 5.0
"""Five times what is promised: within a second of a death on this host."""


class Client:
    """Keeps what it is told; nothing here is a request."""

    def __init__(self) -> None:
        self.chunks: list[PostChunk] = []
        self.unposted: list[EngineOutput] = []
        self.failed: list[tuple[int, BatonError]] = []
        self.pressure: list[bool] = []
        self.can_wait = True

    def on_answer(self, answer: Answer) -> None:
        self.chunks += answer.chunks

    def on_unposted(self, outputs: tuple[EngineOutput, ...]) -> None:
        self.unposted += outputs

    def fail_bucket(self, bucket: int, error: BatonError) -> None:
        self.failed.append((bucket, error))

    def on_pressure(self, is_behind: bool) -> bool:
        self.pressure.append(is_behind)
        return self.can_wait

    def texts(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for chunk in self.chunks:
            texts[chunk.client_id] = texts.get(chunk.client_id, "") + chunk.text
        return texts


@contextlib.asynccontextmanager
async def pool_of(
    num_workers: int, client: Client, tokenizer: TokenizerSpec = TOY, **limits: Any
) -> AsyncIterator[PostPool]:
    pool = PostPool(
        num_workers,
        tokenizer,
        name="test",
        limits=ExecutorLimits(post=PostLimits(**limits)),
        on_pressure=client.on_pressure,
    )
    try:
        await pool.start(client)
        yield pool
    finally:
        await pool.stop()


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> float:
    """How long it took."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < timeout_s
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def open_one(pool: PostPool, client_id: int, stop: tuple[str, ...] = ()) -> bool:
    return pool.open(client_id, text_params(request(stop=stop), CharTokenizer()))


def step(pool: PostPool, *client_ids: int, index: int = 0, is_last: bool = False) -> None:
    """One engine step of one token for each, packed as the engine's worker does."""
    finish = EngineFinish(reason=FinishReason.LENGTH, usage=Usage(prompt_tokens=3))
    groups: dict[int, list[EngineOutput]] = {}
    for client_id in client_ids:
        output = EngineOutput(
            request_id=client_id,
            token_index=index,
            token_ids=(client_id + index,),
            finish=finish if is_last else None,
        )
        groups.setdefault(pool.bucket_of(client_id), []).append(output)
    pool.forward(tuple((bucket, pack_outputs(group)) for bucket, group in groups.items()))


async def test_each_bucket_makes_the_text_of_its_requests() -> None:
    client = Client()
    async with pool_of(3, client) as pool:
        ids = range(1, 31)
        for client_id in ids:
            assert open_one(pool, client_id)
        for index in range(20):
            step(pool, *ids, index=index)
        step(pool, *ids, index=20, is_last=True)
        await until(lambda: sum(chunk.finish is not None for chunk in client.chunks) == 30)
        expected = {i: CharTokenizer().decode(range(i, i + 21)) for i in ids}
        assert client.texts() == expected
        pool.check()
        counters = pool.counters()
        assert (counters["workers"], counters["live"], counters["late"]) == (3, 0, 0)
        assert pool.states == ("serving",) * 3
    assert pool.pids == ()


async def test_a_killed_worker_fails_its_bucket_at_once_and_is_replaced() -> None:
    """Guards: the other buckets' text, and who comes while the replacement starts."""
    client = Client()
    async with pool_of(2, client) as pool:
        for client_id in (1, 2):
            open_one(pool, client_id)
        step(pool, 1, 2)
        await until(lambda: len(client.chunks) == 2)
        os.kill(pool.pids[1], signal.SIGKILL)
        assert await until(lambda: bool(client.failed)) < DEATH_S_MAX
        ((bucket, error),) = client.failed
        assert bucket == 1
        assert isinstance(error, PostprocessError)
        assert error.is_retryable
        assert "SIGKILL" in error.message
        open_one(pool, 3)
        step(pool, 2, index=1)
        step(pool, 3)
        await until(lambda: len(client.chunks) == 4)
        assert client.texts() == {
            1: CharTokenizer().decode([1]),
            2: CharTokenizer().decode([2, 3]),
            3: CharTokenizer().decode([3]),
        }
        assert len(pool.pids) == 2
        assert pool.counters()["deaths"] == 1
        pool.check()


async def test_a_stopped_worker_is_killed_and_what_it_owed_is_given_back() -> None:
    """Guards: requests that wait for ever for a worker that neither answers nor ends."""
    client = Client()
    async with pool_of(2, client, answer_s_max=0.4) as pool:
        stopped = pool.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        for client_id in (1, 2):
            open_one(pool, client_id)
        step(pool, 1, 2)
        took_s = await until(lambda: bool(client.failed))
        assert 0.3 < took_s < 5 * 0.4 + DEATH_S_MAX
        assert "answered nothing" in client.failed[0][1].message
        assert [output.request_id for output in client.unposted] == [2]
        assert list(client.texts()) == [1]
        await until(lambda: pool.states == ("serving",) * 2)
        assert stopped not in pool.pids


async def test_an_idle_worker_may_be_silent_as_long_as_it_likes() -> None:
    client = Client()
    async with pool_of(1, client, answer_s_max=0.2) as pool:
        open_one(pool, 1)
        step(pool, 1)
        await asyncio.sleep(0.8)
        step(pool, 1, index=1, is_last=True)
        await until(lambda: len(client.chunks) == 2)
        assert pool.counters()["deaths"] == 0


async def test_a_bucket_that_dies_too_often_is_served_in_this_process() -> None:
    """Guards: a process spawned for ever, and a bucket that nobody serves."""
    client = Client()
    async with pool_of(2, client, restarts_max=1) as pool:
        for num_deaths in (1, 2):
            await until(lambda: pool.states == ("serving",) * 2)
            os.kill(pool.pids[0], signal.SIGKILL)
            await until(lambda n=num_deaths: len(client.failed) == n)  # type: ignore[misc]
        assert pool.states == ("in_process", "serving")
        assert not open_one(pool, 2)
        assert open_one(pool, 1)
        step(pool, 1, 2)
        await until(lambda: bool(client.chunks))
        assert [output.request_id for output in client.unposted] == [2]
        counters = pool.counters()
        assert (counters["in_process"], counters["workers"], counters["deaths"]) == (1, 1, 2)
        pool.check()


async def test_a_worker_far_behind_holds_the_reading_and_lets_go_again() -> None:
    """Guards: a backlog that grows without end for a worker that is only slow."""
    client = Client()
    async with pool_of(1, client, works_in_flight_max=1, backlog_bytes_max=2000) as pool:
        os.kill(pool.pids[0], signal.SIGSTOP)
        open_one(pool, 1)
        index = 0
        while not client.pressure:
            step(pool, 1, index=index)
            index += 1
        assert client.pressure == [True]
        os.kill(pool.pids[0], signal.SIGCONT)
        await until(lambda: len(client.chunks) == index)
        assert client.pressure == [True, False]
        assert pool.counters()["deaths"] == 0


async def test_a_worker_for_which_nobody_can_wait_is_given_up() -> None:
    client = Client()
    client.can_wait = False
    async with pool_of(1, client, backlog_bytes_max=2000) as pool:
        os.kill(pool.pids[0], signal.SIGSTOP)
        open_one(pool, 1)
        for index in range(1000):
            if not client.failed:
                step(pool, 1, index=index)
        assert [bucket for bucket, _ in client.failed] == [0]
        assert client.pressure == [True, False]
        pool.check()


async def test_what_waits_for_a_starting_worker_is_bounded() -> None:
    """Guards: a backlog without end, and a start that is given up because it is waited for."""
    client = Client()
    async with pool_of(1, client, backlog_bytes_max=2000) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        await until(lambda: len(client.failed) == 1)
        index = 0
        while len(client.failed) == 1:
            step(pool, 1, index=index)
            index += 1
        assert "too much waits" in client.failed[1][1].message
        assert len(client.unposted) == index
        await until(lambda: pool.states == ("serving",))
        assert pool.counters()["deaths"] == 1


async def test_frames_that_are_not_ours_are_counted_and_dropped_at_both_ends() -> None:
    client = Client()
    async with pool_of(1, client) as pool:
        worker = pool._buckets[0]._worker
        assert worker is not None
        sealed = worker._sender._sealer.seal({"a": 1})
        junk = (b"", b"junk", b"\x00" * 4096, sealed, sealed, sealed[:-1] + b"!")
        for frame in junk:
            worker._sender.socket.send(frame)
            assert worker._opener.open(frame) is None
        open_one(pool, 1)
        step(pool, 1)
        await until(lambda: len(client.chunks) == 1)
        counters = pool.counters()
        assert counters["worker_bad_frames"] == counters["bad_frames"] == len(junk)


async def test_a_tokenizer_that_does_not_load_fails_the_start_with_its_own_words() -> None:
    with pytest.raises(ConfigError, match="NoSuch"):
        async with pool_of(2, Client(), TokenizerSpec(factory="protos.errors:NoSuch")):
            pass
    with pytest.raises(ConfigError, match="/nowhere"):
        async with pool_of(1, Client(), TokenizerSpec(model="/nowhere")):
            pass


class Slow(CharTokenizer):
    def __init__(self) -> None:
        time.sleep(60)


class Fatal(CharTokenizer):
    def __init__(self) -> None:
        os._exit(9)


@pytest.mark.parametrize(("kind", "words"), [("Slow", "within 0.5 s"), ("Fatal", "status 9")])
async def test_a_start_that_hangs_or_dies_is_told(kind: str, words: str) -> None:
    spec = TokenizerSpec(factory=f"{__name__}:{kind}")
    with pytest.raises(EngineDeadError, match=words):
        async with pool_of(1, Client(), spec, start_s_max=0.5 if kind == "Slow" else 30.0):
            pass


async def test_a_cancelled_start_leaves_nothing() -> None:
    async def start() -> None:
        async with pool_of(1, Client(), TokenizerSpec(factory=f"{__name__}:Slow")):
            raise AssertionError("it started")

    task = asyncio.create_task(start())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
