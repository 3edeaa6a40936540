"""Worlds that frontends attach to: one in a thread of this process, or any executor's own.

`thread_world` has the real lanes, broker and worker loop, and no process: milliseconds to
start, and everything but a death can be tried on it. `attached` gives proxies on any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from executor.attach.broker import Broker
from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint
from executor.config import EngineConfig
from executor.engine.factory import create_engine
from executor.executor import GenerationExecutor
from executor.inbox import Inbox
from executor.lane import LaneSpec
from executor.lanes import Lanes
from executor.limits import ExecutorLimits
from executor.worker import Heart, Worker
from executor.world.orders import ProcessName
from tests.support.executor_scripted import config as scripted

CLUSTER = AttachKeys({"k1": b"1" * 32, "k0": b"0" * 32})


@dataclass
class ThreadWorld:
    """Rank 0's lanes and loop in threads of this process."""

    engine_config: EngineConfig
    limits: ExecutorLimits
    leader: ProcessName = field(default_factory=ProcessName.own)
    closed: list[tuple[int, str]] = field(default_factory=list)
    """What the broker asked to be closed."""

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.limits.queue_messages_max)
        self.stopping = threading.Event()
        self.lanes = Lanes(
            self.inbox,
            clock=time.monotonic,
            is_stopping=self.stopping.is_set,
            queue_messages_max=self.limits.queue_messages_max,
            message_bytes_max=self.limits.message_bytes_max,
        )
        self.engine = create_engine(self.engine_config, self.inbox.wake)
        self.worker = Worker(self.engine, self.inbox, self.lanes, tombstones_max=4096)
        self.threads = [
            threading.Thread(target=self.lanes.receive_until_closed, name="receiver"),
            threading.Thread(target=self.worker.run, name="loop"),
        ]
        for thread in self.threads:
            thread.start()
        self.heart = Heart(self.worker, self.lanes, self.limits.heartbeat_s)
        self.heart.start()

    async def open_lane(self, spec: LaneSpec) -> LaneSpec:
        return await asyncio.to_thread(self.lanes.open, spec)

    def close_lane(self, frontend_id: int, why: str) -> None:
        self.closed.append((frontend_id, why))
        self.lanes.close(frontend_id, why)

    def close(self) -> None:
        self.stopping.set()
        self.inbox.stop()
        self.threads[1].join()
        self.heart.stop()
        self.engine.close()
        self.lanes.shut(has_receiver=True)
        self.threads[0].join()


@dataclass
class Rig:
    """A world with its broker. `point` is where frontends attach."""

    world: ThreadWorld
    broker: Broker
    point: AttachPoint


@contextlib.asynccontextmanager
async def thread_world(
    engine: EngineConfig | None = None, *, form: str = "attach", **limits: Any
) -> AsyncIterator[Rig]:
    bounds = ExecutorLimits(**limits)
    if form == "rpc":
        broker = Broker.on_tcp("127.0.0.1:0", CLUSTER, bounds)
        point = tcp_point(broker.port)
    else:
        broker = Broker.on_ipc(bounds)
        point = broker.local_point()
    try:
        world = ThreadWorld(engine or scripted(), bounds)
        try:
            broker.serve(world)
            yield Rig(world, broker, point)
            broker.check()
        finally:
            await asyncio.to_thread(world.close)
    finally:
        await broker.close()


def tcp_point(port: int, keys: AttachKeys = CLUSTER) -> AttachPoint:
    where = f"127.0.0.1:{port}"
    return AttachPoint(form="rpc", endpoint=f"tcp://{where}", keys=keys, where=where)


@contextlib.asynccontextmanager
async def attached(
    point: AttachPoint, num: int = 1, *, tokenizer: Any = None, **limits: Any
) -> AsyncIterator[list[GenerationExecutor]]:
    """`num` frontends on one world."""
    async with contextlib.AsyncExitStack() as stack:
        executors = []
        for index in range(num):
            executor = await GenerationExecutor.create(
                EngineConfig(),
                name=f"front-{index}",
                tokenizer=tokenizer,
                limits=ExecutorLimits(**limits),
                point=point,
            )
            stack.push_async_callback(executor.shutdown)
            executors.append(executor)
        yield executors
