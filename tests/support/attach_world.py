"""Worlds that frontends attach to: one in a thread of this process, or one of real ranks.

`thread_world` has the real lanes, broker and worker loop, and no process: milliseconds to
start, and everything but a death can be tried on it. `shared_world` has a worker process of its
own, and this process as its owner. `attached` gives proxies on any of them; `rpc` and `attach3`
open one executor as a contract suite wants it.
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
from executor.attach.owner import share_engine
from executor.attach.point import AttachPoint
from executor.config import EngineConfig
from executor.engine.factory import create_engine
from executor.executor import GenerationExecutor
from executor.inbox import Inbox
from executor.lane import LaneSpec
from executor.lanes import Lanes
from executor.limits import ExecutorLimits
from executor.proxy import Proxy
from executor.worker import Heart, Worker
from executor.world.orders import ProcessName
from tests.support.executor_scripted import config as scripted
from tests.support.executor_scripted import toy_spec
from tests.support.executor_spread import Spread

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
            look_s=self.limits.heartbeat_s,
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
    engine: EngineConfig | None = None,
    *,
    form: str = "attach",
    leader: ProcessName | None = None,
    **limits: Any,
) -> AsyncIterator[Rig]:
    """`leader`: where rank 0 says that it is."""
    bounds = ExecutorLimits(**limits)
    broker, point = open_broker(form, bounds)
    try:
        world = ThreadWorld(engine or scripted(), bounds, leader or ProcessName.own())
        try:
            broker.serve(world)
            yield Rig(world, broker, point)
            broker.check()
        finally:
            await asyncio.to_thread(world.close)
    finally:
        await broker.close()


@dataclass
class Shared:
    """A world of real ranks, owned by this process."""

    owner: Proxy
    broker: Broker
    point: AttachPoint


@contextlib.asynccontextmanager
async def shared_world(
    engine: EngineConfig, *, form: str = "attach", **limits: Any
) -> AsyncIterator[Shared]:
    bounds = ExecutorLimits(**limits)
    broker, point = open_broker(form, bounds)
    try:
        owner = await share_engine(
            engine, broker, name="owner", limits=bounds, progress=lambda _: None
        )
        try:
            yield Shared(owner, broker, point)
        finally:
            await owner.shutdown()
            broker.check()
    finally:
        await broker.close()


def open_broker(form: str, limits: ExecutorLimits) -> tuple[Broker, AttachPoint]:
    if form == "rpc":
        broker = Broker.on_tcp("127.0.0.1:0", CLUSTER, limits)
        return broker, tcp_point(broker.port)
    broker = Broker.on_ipc(limits)
    return broker, broker.local_point()


def tcp_point(port: int, keys: AttachKeys = CLUSTER) -> AttachPoint:
    where = f"127.0.0.1:{port}"
    return AttachPoint(form="rpc", endpoint=f"tcp://{where}", keys=keys, where=where)


@contextlib.asynccontextmanager
async def attached(
    point: AttachPoint,
    num: int = 1,
    *,
    engine: EngineConfig | None = None,
    tokenizer: Any = None,
    **limits: Any,
) -> AsyncIterator[list[GenerationExecutor]]:
    """`num` frontends on one world."""
    async with contextlib.AsyncExitStack() as stack:
        executors = []
        for _ in range(num):
            executor = await GenerationExecutor.create(
                engine or EngineConfig(),
                name="front",
                tokenizer=tokenizer,
                tokenizer_spec=toy_spec(tokenizer),
                limits=ExecutorLimits(**limits),
                point=point,
            )
            stack.push_async_callback(executor.shutdown)
            executors.append(executor)
        yield executors


@contextlib.asynccontextmanager
async def rpc(
    engine: EngineConfig, *, tokenizer: Any = None, **limits: Any
) -> AsyncIterator[GenerationExecutor]:
    """One frontend on a world over tcp."""
    async with (
        shared_world(engine, form="rpc", **limits) as world,
        attached(world.point, engine=engine, tokenizer=tokenizer, **limits) as fronts,
    ):
        yield fronts[0]


@contextlib.asynccontextmanager
async def attach3(
    engine: EngineConfig, *, tokenizer: Any = None, **limits: Any
) -> AsyncIterator[GenerationExecutor]:
    """Three frontends on one world, as one."""
    async with (
        shared_world(engine, **limits) as world,
        attached(world.point, 3, engine=engine, tokenizer=tokenizer, **limits) as fronts,
    ):
        spread: Any = Spread(fronts)
        yield spread
