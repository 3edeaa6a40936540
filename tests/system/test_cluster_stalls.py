"""A stopped engine worker under streams through the router: told, survived, or given up.

The stated bound is silence + a heartbeat + 1 s; tests allow five times that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient
from protos.errors import BatonError
from tests.support.cluster import Cluster, wait_until_async
from tests.support.text_toys import byte_level_backend, write_folder

pytestmark = pytest.mark.system
SILENCE_MS = 900
BOUND_S = 2 * SILENCE_MS / 1000 + 1.0
ALLOWANCE = 5
LEASE_MS = 300
NUM_STREAMS = 6
PROMPT = (5, 6, 7)
MAX_TOKENS = 1500
SHORT: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": 7}
WORKER_DEATH_EXIT = 70
EXIT_S_MAX = 20.0


def engine(*, give_up_ms: int) -> dict[str, Any]:
    return {
        "engine": "scripted",
        "scripted": {"step_ms": 20, "vocab_size": 400},
        # The scripted engine moves no bytes: its leases end by expiry, never by an ack.
        "transfer": {"lease_ms": LEASE_MS},
        "health": {"silence_ms": SILENCE_MS, "stall_ms": 2000, "give_up_ms": give_up_ms},
    }


@asynccontextmanager
async def cluster(
    folder: Path, *, give_up_ms: int = 120_000, num_generation: int = 1, **over: Any
) -> AsyncIterator[Cluster]:
    started = await asyncio.to_thread(
        Cluster.start,
        folder / "cluster",
        engine(give_up_ms=give_up_ms),
        tokenizer=write_folder(folder / "toy", byte_level_backend()),
        num_generation=num_generation,
        **over,
    )
    try:
        yield started
    finally:
        await asyncio.to_thread(started.stop)


class Stream:
    """One long answer, read to its end; a failure is an end too."""

    def __init__(self, client: AsyncClient, **fields: Any) -> None:
        self.token_ids: list[int] = []
        self.error: BatonError | None = None
        self.task = asyncio.ensure_future(self._read(client, fields))

    async def _read(self, client: AsyncClient, fields: dict[str, Any]) -> None:
        fields = SHORT | {"max_tokens": MAX_TOKENS, "timeout_s": 120} | fields
        try:
            async for chunk in await client.generate(PROMPT, stream=True, **fields):
                self.token_ids += chunk.token_ids
        except BatonError as error:
            self.error = error


async def ended(streams: list[Stream], within_s: float) -> None:
    _, pending = await asyncio.wait([stream.task for stream in streams], timeout=within_s)
    assert not pending, f"{len(pending)} streams hang"


async def server_says(cluster: Cluster, name: str, state: str) -> str:
    """Waits for the state; returns the detail."""
    await wait_until_async(
        lambda: cluster.info(name).state == state, BOUND_S * ALLOWANCE, f"{name} to be {state}"
    )
    return (await asyncio.to_thread(cluster.info, name)).detail


def is_serving(cluster: Cluster, name: str) -> bool:
    with grpc.insecure_channel(cluster.address(name)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def all_up(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.wait_servers_up)


async def test_a_stopped_generation_worker(tmp_path: Path) -> None:
    """Guards streams that hang until their deadline on a worker that was stopped, while
    the server says that it is ready and the router sends more requests there."""
    async with cluster(tmp_path) as running, AsyncClient(running.address()) as client:
        name = "generation-0"
        expected = (await client.generate(PROMPT, **SHORT)).token_ids
        streams = [Stream(client) for _ in range(NUM_STREAMS)]
        await wait_until_async(lambda: all(len(s.token_ids) > 3 for s in streams), 20, "tokens")
        pid = running.processes[name].worker_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        await ended(streams, BOUND_S * ALLOWANCE)
        for stream in streams:
            assert stream.error is not None
            assert stream.error.status == "UNAVAILABLE"
            assert f"(process {pid}) has said nothing for" in stream.error.message
            assert stream.token_ids[:20] == list(expected)[: len(stream.token_ids)]
        assert "has said nothing for" in await server_says(running, name, "stalled")
        await wait_until_async(lambda: not is_serving(running, name), BOUND_S, "bad health")
        await wait_until_async(lambda: not is_serving(running, "router"), BOUND_S, "the router's")
        seen = (await asyncio.to_thread(running.info)).servers
        told = next(server for server in seen if server.name == name)
        assert told.state == "down"
        assert "has said nothing for" in told.detail
        began_s = time.monotonic()
        refused = Stream(client)
        await ended([refused], BOUND_S)
        assert time.monotonic() - began_s < 1.0
        assert refused.error is not None
        assert refused.error.status == "UNAVAILABLE"
        os.kill(pid, signal.SIGCONT)
        await server_says(running, name, "ready")
        await all_up(running)
        assert is_serving(running, name)
        again = await client.generate(PROMPT, **SHORT)
        assert again.token_ids == expected
        await asyncio.to_thread(running.wait_baseline, LEASE_MS / 1000 + 5.0)
        assert running.processes[name].worker_pids() == [pid]


async def test_a_stopped_context_worker(tmp_path: Path) -> None:
    """Prefills end at once; streams whose KV was handed over do not notice."""
    over: dict[str, Any] = {"context_engine": {"scripted": {"step_ms": 500, "vocab_size": 400}}}
    async with cluster(tmp_path, **over) as running, AsyncClient(running.address()) as client:
        name = "context-0"
        expected = (await client.generate(PROMPT, **SHORT)).token_ids
        flowing = Stream(client, max_tokens=300)
        await wait_until_async(lambda: len(flowing.token_ids) > 3, 20, "the flowing stream")
        pid = running.processes[name].worker_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        streams = [Stream(client) for _ in range(NUM_STREAMS)]
        await ended(streams, BOUND_S * ALLOWANCE)
        for stream in streams:
            assert stream.error is not None
            assert stream.error.status == "UNAVAILABLE"
            assert not stream.token_ids
        assert "has said nothing for" in await server_says(running, name, "stalled")
        os.kill(pid, signal.SIGCONT)
        await ended([flowing], 30)
        assert flowing.error is None
        assert len(flowing.token_ids) == 300
        await all_up(running)
        again = await client.generate(PROMPT, **SHORT)
        assert again.token_ids == expected
        await asyncio.to_thread(running.wait_baseline, LEASE_MS / 1000 + 5.0)


async def test_a_worker_that_never_recovers_ends_its_server_and_another_serves(
    tmp_path: Path,
) -> None:
    """Guards F10: a server that stays up and answers UNAVAILABLE for ever; and a router
    that sends requests to it though a second one is well."""
    async with (
        cluster(tmp_path, give_up_ms=6000, num_generation=2) as running,
        AsyncClient(running.address()) as client,
    ):
        name = "generation-0"
        streams = [Stream(client) for _ in range(NUM_STREAMS)]
        await wait_until_async(lambda: all(s.token_ids for s in streams), 20, "tokens")
        os.kill(running.processes[name].worker_pids()[0], signal.SIGSTOP)
        await server_says(running, name, "stalled")
        for _ in range(3):
            answer = await client.generate(PROMPT, max_tokens=5, ignore_eos=True)
            assert len(answer.token_ids) == 5
        failed = [stream for stream in streams if stream.task.done()]
        assert 0 < len(failed) < NUM_STREAMS  # those on the other server go on
        process = running.processes[name].popen
        assert await asyncio.to_thread(process.wait, EXIT_S_MAX) == WORKER_DEATH_EXIT
        assert "health.give_up_ms is 6000" in running.processes[name].log.read_text()
        for stream in streams:
            stream.task.cancel()
