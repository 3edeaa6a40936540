"""The owner's side of attaching: lets frontends in, on a socket of its own.

    bound (a port in use is told at once) -> serving a world -> the world has ended -> closed

`broker_table.py` decides; this opens and seals frames, asks rank 0 for lanes, and watches the
frontends whose processes are on this host: the lane of one that ends is closed at once, that of
one elsewhere by its silence. Whoever has no key is counted and dropped, some frames a turn, told
of once in a while, and takes no memory. Everything runs on the event loop that made it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Protocol, assert_never

import zmq
from zmq.utils import z85

from common.rpc import split_address
from executor.attach import broker_events as events
from executor.attach.broker_table import BrokerBounds, BrokerTable
from executor.attach.keys import DOWN, UP, AttachKeys, curve_seed
from executor.attach.loop_socket import LoopSocket
from executor.attach.messages import (
    KEY_MARK,
    Attach,
    FromBroker,
    Goodbye,
    Knock,
    frontend_head,
    frontend_in,
    key_head,
    pack,
    unpack,
)
from executor.attach.point import WILDCARDS, AttachPoint
from executor.attach.process_watch import ProcessWatch
from executor.ipc import PrivateDirectory
from executor.lane import LaneSpec
from executor.limits import ExecutorLimits
from executor.world.orders import ProcessName
from protos.errors import BatonError, ConfigError, InternalError, describe

logger = logging.getLogger(__name__)
STRANGER_AGAIN_S = 30.0
"""Between two log lines of knocks that are not sealed with our secret."""


class LaneOwner(Protocol):
    """What is needed of a world; it is up when it is handed over."""

    @property
    def leader(self) -> ProcessName: ...

    async def open_lane(self, spec: LaneSpec) -> LaneSpec:
        """With the endpoints that were taken. Raises BatonError."""

    def close_lane(self, frontend_id: int, why: str) -> None: ...


class Broker:
    """`close` is safe twice."""

    def __init__(self, endpoint: str, keys: AttachKeys, limits: ExecutorLimits) -> None:
        """`endpoint` as zmq takes it. Raises ConfigError where it cannot be had."""
        self._loop = asyncio.get_running_loop()
        self._keys = keys.keys
        self._is_tcp = endpoint.startswith("tcp:")
        self._folder: PrivateDirectory | None = None
        self._world: LaneOwner | None = None
        self._watches: dict[int, ProcessWatch] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._table = BrokerTable(
            keys.keys,
            secrets.token_bytes(32),
            BrokerBounds(heartbeat_s=limits.heartbeat_s, silence_s=limits.lane_silence_s),
        )
        self.on_lost: Callable[[ProcessName], None] = lambda _: None
        """Of a frontend whose lane rank 0 has closed by itself: it may be standing still."""
        self.num_bad_frames = 0
        self._stranger_after_s = 0.0
        self._link = LoopSocket(zmq.ROUTER, self._on_frames)
        self._link.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._link.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._link.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._link.close()
            why = zmq.strerror(error.errno or 0).lower()
            raise ConfigError(
                f"cannot listen on {endpoint}: {why}; set listen to a free port of this host "
                "(0 picks one), or stop what uses this one",
                field="listen",
                value=endpoint,
            ) from None
        self.endpoint = self._link.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._link.start()

    @classmethod
    def on_tcp(cls, listen: str, keys: AttachKeys, limits: ExecutorLimits) -> Broker:
        """`listen` is HOST:PORT; port 0 takes any. Raises ConfigError."""
        host, port = split_address(listen)
        return cls(f"tcp://{host}:{port or '*'}", keys, limits)

    @classmethod
    def on_ipc(cls, limits: ExecutorLimits) -> Broker:
        """In a private folder, with a fresh key: for frontends that this process starts."""
        folder = PrivateDirectory()
        try:
            keys = AttachKeys.local(secrets.token_bytes(32))
            broker = cls(folder.endpoint("attach"), keys, limits)
        except BaseException:
            folder.close()
            raise
        broker._folder = folder
        return broker

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def local_point(self) -> AttachPoint:
        """For a process of this host that is handed it."""
        return AttachPoint(
            form="attach", endpoint=self.endpoint, keys=AttachKeys(self._keys), where=self.endpoint
        )

    def serve(self, world: LaneOwner) -> None:
        """From now on frontends are let in."""
        self._world = world
        leader = world.leader
        self._feed(
            events.WorldUp(leader, "" if leader.is_here() else leader.host.partition("/")[0])
        )

    def lane_closed(self, frontend_id: int) -> None:
        """Rank 0 has closed it by itself, or because we asked."""
        frontend = self._table.frontend(frontend_id)
        if frontend is not None:
            self._feed(events.LaneGone(frontend_id))
            self.on_lost(frontend.request.process)

    def world_ended(self, cause: str) -> None:
        """Every frontend is told, and nobody is let in any more."""
        self._feed(events.WorldDown(cause))

    def counters(self) -> dict[str, int]:
        return {**self._table.counters(), "bad_frames": self.num_bad_frames}

    def check(self) -> None:
        """Raises AssertionError where the books contradict themselves."""
        self._table.check()
        assert len(self._watches) <= len(self._table)

    async def close(self) -> None:
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self._link.close()
        if self._folder is not None:
            self._folder.close()

    # --- frames ---------------------------------------------------------------

    def _on_frames(self, parts: list[bytes]) -> None:
        event = self._opened(parts)
        if event is not None:
            self._feed(event)
            return
        self.num_bad_frames += 1
        if len(parts) == 3 and parts[1][:1] == KEY_MARK:
            self._tell_stranger()

    def _tell_stranger(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._stranger_after_s:
            self._stranger_after_s = now_s + STRANGER_AGAIN_S
            who = self._link.peer or "a process of this host"
            logger.warning("somebody at %s knocks with another secret", who)

    def _opened(self, parts: list[bytes]) -> events.Event | None:
        """None for whatever is not sealed with a key that its head may name."""
        if len(parts) != 3:
            return None
        route, head, frame = parts
        frontend_id = frontend_in(head)
        if frontend_id is not None:
            frontend = self._table.frontend(frontend_id)
            known = frontend is not None and unpack(frontend.key, UP, head, frame)
            return events.Left(route, frontend_id) if isinstance(known, Goodbye) else None
        key_id = head[1:].decode(errors="replace") if head[:1] == KEY_MARK else ""
        key = self._keys.get(key_id)
        message = unpack(key, UP, head, frame) if key is not None else None
        match message:
            case Knock():
                return events.Knocked(route, key_id, message)
            case Attach():
                return events.Asked(route, key_id, message)
            case _:
                return None

    def _send(self, route: bytes, head: bytes, key: bytes, message: FromBroker) -> None:
        """Whoever does not read, or is gone, asks again or is missed by its silence."""
        self._link.send([route, head, pack(key, DOWN, head, message)])

    # --- effects --------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        for effect in self._table.handle(event, self._loop.time()):
            self._carry_out(effect)

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Answer():
                head = key_head(effect.key_id)
                self._send(effect.route, head, self._keys[effect.key_id], effect.message)
            case events.Tell():
                head = frontend_head(effect.frontend_id)
                self._send(effect.route, head, effect.key, effect.message)
            case events.OpenLane():
                task = self._loop.create_task(self._open_lane(effect))
                self._opening[effect.frontend_id] = task
            case events.CloseLane():
                self._close_lane(effect)
            case events.Watch():
                self._watch(effect)
            case events.Unwatch():
                watch = self._watches.pop(effect.frontend_id, None)
                if watch is not None:
                    watch.close()
            case _:
                assert_never(effect)

    async def _open_lane(self, wish: events.OpenLane) -> None:
        assert self._world is not None
        frontend_id = wish.frontend_id
        try:
            spec = await self._world.open_lane(self._spec(wish))
            self._feed(events.LaneOpen(frontend_id, spec.requests_endpoint, spec.results_endpoint))
        except BatonError as error:
            self._feed(events.LaneRefused(frontend_id, error.to_data()))
        except Exception as error:
            logger.exception("the lane of frontend %d could not be opened", frontend_id)
            said = InternalError(describe(error))
            self._feed(events.LaneRefused(frontend_id, said.to_data()))
        finally:
            del self._opening[frontend_id]

    def _spec(self, wish: events.OpenLane) -> LaneSpec:
        requests, results = self._lane_endpoints(wish.frontend_id)
        return LaneSpec(
            frontend_id=wish.frontend_id,
            key=wish.key,
            requests_endpoint=requests,
            results_endpoint=results,
            worker_binds=True,
            curve_secret_key=z85.encode(curve_seed(wish.key)) if "tcp:" in requests else b"",
            silence_s=wish.silence_s,
            num_buckets=wish.num_buckets,
        )

    def _lane_endpoints(self, frontend_id: int) -> tuple[str, str]:
        """Beside our own: in our folder, or on our interface, where rank 0 has it too; else on
        every interface of the host where it is."""
        assert self._world is not None
        is_here = self._world.leader.is_here()
        if is_here and not self._is_tcp:
            stem = self.endpoint.rpartition("/")[0]
            return f"{stem}/{frontend_id}q", f"{stem}/{frontend_id}r"
        host = self.endpoint.removeprefix("tcp://").rpartition(":")[0] if self._is_tcp else "*"
        if not is_here or host.strip("[]") in WILDCARDS:
            host = "[::]" if "[" in self.endpoint else "*"
        return f"tcp://{host}:*", f"tcp://{host}:*"

    def _close_lane(self, effect: events.CloseLane) -> None:
        if self._world is not None:
            self._world.close_lane(effect.frontend_id, effect.why)

    def _watch(self, effect: events.Watch) -> None:
        frontend_id = effect.frontend_id
        self._watches[frontend_id] = ProcessWatch(
            effect.process, self._loop, lambda: self._feed(events.ProcessGone(frontend_id))
        )
