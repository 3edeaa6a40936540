"""A cancel in any state frees everything, without any new traffic.

The servers run one sequence at a time, so that a state can be held: a request
waits queued behind a long one, prefills in small chunks, sits handed off behind
a long decode, or decodes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from baton import AsyncClient
from protos.errors import RequestCancelledError
from tests.support.cluster import Cluster, wait_until_async
from tests.support.golden import GOLDEN, GoldenPrompt, demo_engine, demo_model

pytestmark = pytest.mark.system
LONG = next(p for p in GOLDEN if p.name == "length_1203")
SHORT = next(p for p in GOLDEN if p.name == "length_17")
ONE_AT_A_TIME = {"max_sequences": 1, "max_batch_tokens": 64, "prefill_chunk_tokens": 64}
WITHIN_S = 5.0
FIRST_TOKENS = itertools.count(1000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    engine = demo_engine(scheduler=ONE_AT_A_TIME)
    cluster = Cluster.start(tmp_path_factory.mktemp("cancels"), engine, tokenizer=demo_model())
    yield cluster
    exits = cluster.stop()
    assert set(exits.values()) == {0}, exits


def fresh_long_prompt() -> GoldenPrompt:
    """Another first token each time, so that the prefix cache cannot shorten the prefill."""
    first = next(FIRST_TOKENS)
    return dataclasses.replace(LONG, prompt_ids=[first, *LONG.prompt_ids[1:]])


class Stream:
    """One request whose chunks are collected in the background."""

    def __init__(self, stream: Any, external_id: str) -> None:
        self.stream = stream
        self.external_id = external_id
        self.num_tokens = 0
        self.error: BaseException | None = None
        self.task = asyncio.ensure_future(self._collect())

    async def _collect(self) -> None:
        try:
            async for chunk in self.stream:
                self.num_tokens += len(chunk.token_ids)
        except RequestCancelledError as error:
            self.error = error


async def start(
    client: AsyncClient, prompt: GoldenPrompt, external_id: str, max_tokens: int
) -> Stream:
    stream = await client.generate(
        prompt.prompt_ids,
        max_tokens=max_tokens,
        ignore_eos=True,
        external_id=external_id,
        stream=True,
    )
    return Stream(stream, external_id)


async def by_closing(client: AsyncClient, stream: Stream) -> None:
    """The client goes away: its connection's stream is reset."""
    stream.task.cancel()
    await asyncio.wait([stream.task])
    await stream.stream.aclose()


async def by_abort(client: AsyncClient, stream: Stream) -> None:
    assert await client.abort(stream.external_id)
    async with asyncio.timeout(WITHIN_S):
        await stream.task
    assert isinstance(stream.error, RequestCancelledError)


Cancel = Callable[[AsyncClient, Stream], Awaitable[None]]
cancels = pytest.mark.parametrize("cancel", [by_closing, by_abort])


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address()) as client:
        yield client


async def baseline(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.wait_baseline, WITHIN_S)


def entries(cluster: Cluster, server: str) -> int:
    return sum(cluster.ledger(server).entries_by_state.values())


def num_live_blocks(cluster: Cluster, server: str) -> int:
    states = cluster.ledger(server).blocks_by_state
    return states.get("live", 0) + states.get("reserved", 0)


@cancels
async def test_cancel_while_queued(cluster: Cluster, client: AsyncClient, cancel: Cancel) -> None:
    first = await start(client, fresh_long_prompt(), "running", 2)
    await wait_until_async(lambda: num_live_blocks(cluster, "context-0") > 0, 5, "prefill")
    queued = await start(client, SHORT, "queued", 2)
    await wait_until_async(lambda: entries(cluster, "context-0") == 2, 5, "both at the server")
    await cancel(client, queued)
    await wait_until_async(
        lambda: entries(cluster, "context-0") == 1 or first.task.done(), WITHIN_S, "the cancel"
    )
    await first.task
    assert first.num_tokens == 2
    await baseline(cluster)


@cancels
async def test_cancel_while_prefilling(
    cluster: Cluster, client: AsyncClient, cancel: Cancel
) -> None:
    stream = await start(client, fresh_long_prompt(), "prefilling", 2)
    await wait_until_async(lambda: num_live_blocks(cluster, "context-0") > 0, 5, "prefill")
    await cancel(client, stream)
    assert stream.num_tokens == 0, "it was too late to cancel a prefill"
    await baseline(cluster)


@cancels
async def test_cancel_while_handed_off(
    cluster: Cluster, client: AsyncClient, cancel: Cancel
) -> None:
    """The first token is out, the KV waits under its lease, generation is busy."""
    busy = await start(client, SHORT, "busy", 400)
    await wait_until_async(lambda: busy.num_tokens > 2, 10, "the decode")
    waiting = await start(client, GOLDEN[5], "waiting", 8)
    await wait_until_async(lambda: waiting.num_tokens == 1, 10, "the first token")
    await wait_until_async(lambda: num_live_blocks(cluster, "context-0") > 0, 5, "the lease")
    await cancel(client, waiting)
    await wait_until_async(
        lambda: num_live_blocks(cluster, "context-0") == 0, WITHIN_S, "the lease's end"
    )
    assert not busy.task.done(), "the decode ended too early to hold the state"
    await cancel(client, busy)
    await baseline(cluster)


@cancels
async def test_cancel_while_decoding(cluster: Cluster, client: AsyncClient, cancel: Cancel) -> None:
    stream = await start(client, SHORT, "decoding", 400)
    await wait_until_async(lambda: stream.num_tokens > 4, 10, "tokens")
    await cancel(client, stream)
    assert stream.num_tokens < 400
    await baseline(cluster)


async def test_storm_of_cancels_needs_no_traffic(cluster: Cluster, client: AsyncClient) -> None:
    """F1: cancelled prefills that nobody fetches must give their blocks back by themselves."""
    streams = [await start(client, GOLDEN[5 + i % 3], f"storm-{i}", 50) for i in range(24)]
    for i, stream in enumerate(streams):
        if i % 3 == 0:
            await asyncio.sleep(0.05)
        await by_closing(client, stream)
    await baseline(cluster)
    probe = await client.generate(SHORT.prompt_ids, max_tokens=4, ignore_eos=True)
    assert list(probe.token_ids) == SHORT.output_ids[:4]


async def test_abort_of_an_unknown_request(client: AsyncClient) -> None:
    assert not await client.abort("nobody")
