"""An rpc frontend behind a network that breaks: through a relay on another loopback address.

Over hosts there is no process to watch. What is left: a gap where the connection came back, the
silence where it did not, and the broker's word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from executor.attach.point import AttachPoint
from executor.health import HealthBounds
from executor.lane import LaneSpec
from executor.world.orders import ProcessName
from protos.errors import EngineDeadError, ServerUnavailableError
from tests.support.attach_world import Rig, attached, thread_world
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import collect, config, expected, request

FAR = "127.0.0.2"
SLOW = config(step_ms=2.0)
BOUNDS: dict[str, Any] = {"heartbeat_s": 0.1, "lane_silence_s": 1.0}


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


@dataclass
class Network:
    """Carries what comes to FAR:port to 127.0.0.1:port, until it is cut."""

    is_down: bool = False
    servers: list[asyncio.Server] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def carry(self, port: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.writers.append(writer)
            if self.is_down:
                writer.close()
                return
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
            self.writers.append(there_writer)
            for source, sink in ((reader, there_writer), (there_reader, writer)):
                self.tasks.append(asyncio.create_task(_pump(source, sink)))

        self.servers.append(await asyncio.start_server(accept, FAR, port))

    def cut(self) -> None:
        """As a reset does: what is under way is lost."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def close(self) -> None:
        self.is_down = True
        self.cut()
        for server in self.servers:
            server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for server in self.servers:
            await server.wait_closed()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()


@dataclass
class FarRig:
    rig: Rig
    network: Network
    point: AttachPoint


@pytest.fixture
async def far() -> AsyncIterator[FarRig]:
    network = Network()
    elsewhere = ProcessName(1, 1, "/boot/pids")  # no name: reached where the broker is
    async with thread_world(SLOW, form="rpc", leader=elsewhere, **BOUNDS) as rig:
        await network.carry(rig.broker.port)
        open_lane = rig.world.open_lane

        async def open_and_carry(spec: LaneSpec) -> LaneSpec:
            here = "tcp://127.0.0.1:*"  # and not on every interface: FAR is the network's
            opened = await open_lane(
                msgspec.structs.replace(spec, requests_endpoint=here, results_endpoint=here)
            )
            for endpoint in (opened.requests_endpoint, opened.results_endpoint):
                await network.carry(int(endpoint.rpartition(":")[2]))
            return opened

        rig.world.open_lane = open_and_carry  # type: ignore[method-assign]
        where = f"{FAR}:{rig.broker.port}"
        keys = rig.point.keys
        point = AttachPoint(form="rpc", endpoint=f"tcp://{where}", keys=keys, where=where)
        try:
            yield FarRig(rig, network, point)
        finally:
            await network.close()


async def read_into(received: list[int], result: Any) -> None:
    async for chunk in result:
        received += chunk.token_ids


async def cut_often(network: Network) -> None:
    while True:
        await asyncio.sleep(0.05)
        network.cut()


async def test_a_connection_that_breaks_and_comes_back_never_costs_a_tokens_place(
    far: FarRig,
) -> None:
    """Frames that were under way are lost with it, or none were: then all goes on. Guards: a
    stream that goes on without its middle."""
    async with attached(far.point, heartbeat_s=0.1) as (front,):
        results = [front.submit(request(f"r{i}", (i, 1), max_tokens=2000)) for i in range(40)]
        received: list[list[int]] = [[] for _ in results]
        cutting = asyncio.create_task(cut_often(far.network))
        reading = (
            asyncio.wait_for(read_into(into, result), 20)
            for into, result in zip(received, results, strict=True)
        )
        ends = await asyncio.gather(*reading, return_exceptions=True)
        told = str(await asyncio.wait_for(front.wait_dead(), 20))  # a beat is lost, if no token
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        for i, (tokens, end) in enumerate(zip(received, ends, strict=True)):
            assert tuple(tokens) == expected((i, 1), len(tokens))
            is_whole = end is None and len(tokens) == 2000  # before the first frame was lost
            assert is_whole or isinstance(end, EngineDeadError)
        assert "frames are lost" in told or "closed our lane" in told
    async with asyncio.timeout(5):
        while len(far.rig.world.lanes):  # noqa: ASYNC110 - threads tell nobody
            await asyncio.sleep(0.01)
    async with attached(far.point) as (again,):
        assert len(await collect(again.submit(request("s", max_tokens=5)))) > 0


async def test_a_network_that_is_gone_costs_what_is_open_and_then_the_engine(far: FarRig) -> None:
    """The bounds over hosts: silence_ms, then give_up_ms; rank 0 closes the lane by itself."""
    health = HealthBounds(silence_s=0.5, stall_s=30.0, give_up_s=1.5)
    async with attached(far.point, health=health, heartbeat_s=0.1) as (front,):
        result = front.submit(request("r", max_tokens=8000))
        await anext(result)
        far.network.is_down = True
        far.network.cut()
        with pytest.raises(ServerUnavailableError, match="has said nothing for"):
            await asyncio.wait_for(collect(result), 5)
        async with asyncio.timeout(5):
            while len(far.rig.world.worker._ledger):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        cause = await asyncio.wait_for(front.wait_dead(), 10)
        assert "was given up by this frontend" in cause.message


async def test_the_owner_tells_over_hosts_what_no_pidfd_can(far: FarRig) -> None:
    async with attached(far.point, heartbeat_s=0.1) as (front,):
        result = front.submit(request("r", max_tokens=8000))
        await anext(result)
        far.rig.broker.world_ended("rank 0 was killed by SIGKILL")
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await asyncio.wait_for(collect(result), 5)
