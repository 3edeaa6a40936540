"""The world as its owner sees it: launched, assembled, loaded, serving, and one of two ends.

`events.py` decides; this carries out: it owns the status socket, the launcher, the watches over
ranks' processes, and the timer. Everything runs on the event loop that made it. After a death
and after `stop`, `dead` holds the first cause. `stop` frees everything, abandons what does not
end within its bound, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import assert_never

from executor.config import EngineConfig
from executor.engine.seam import EngineIdentity
from executor.ipc import KEY_BYTES, PrivateDirectory
from executor.lane import LaneSpec
from executor.limits import ExecutorLimits
from executor.world import events
from executor.world.frames import SocketBounds, own_address
from executor.world.lane_desk import LaneDesk
from executor.world.launch import Launcher, create_launcher
from executor.world.messages import (
    BeatAck,
    CloseLane,
    DiedAck,
    HelloAck,
    LaneClosed,
    LaneOpened,
    Leave,
    RankBeat,
    RankDied,
    RankDone,
    RankHello,
    RankJoined,
    RankReady,
    ReadyAck,
    StopRank,
    ToOwner,
    ToRank,
)
from executor.world.orders import Orders, ProcessName, make_orders
from executor.world.roll import Roll
from executor.world.status import StatusServer
from executor.world.table import SHUT_DOWN, Phase, WorldBounds, WorldTable
from protos.errors import (
    ConfigError,
    EngineDeadError,
    ErrorData,
    from_data,
)

logger = logging.getLogger(__name__)
LINES_IN_MESSAGE_MAX = 8


class World:
    """`lane`: the owner's own, opened before anything is loaded; a broker needs none."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        limits: ExecutorLimits,
        on_dead: Callable[[EngineDeadError], None],
        launcher: Launcher | None = None,
        lane: LaneSpec | None = None,
        on_lane_closed: Callable[[int, str], None] = lambda _id, _why: None,
    ) -> None:
        self.name = name
        self._config = config
        self._limits = limits
        self._on_dead = on_dead
        self._on_lane_closed = on_lane_closed
        self._lane = lane
        self._loop = asyncio.get_running_loop()
        self.num_ranks = config.executor.world.num_ranks
        self._launcher = launcher or create_launcher(
            config.executor.world, name=name, limits=limits
        )
        self._key = secrets.token_bytes(KEY_BYTES)
        self._folder = None if self._launcher.spans_hosts else PrivateDirectory()
        self._status = StatusServer(
            self._endpoint("status"),
            key=self._key,
            num_ranks=self.num_ranks,
            bounds=SocketBounds(limits.queue_messages_max, limits.message_bytes_max),
            on_message=self._on_message,
        )
        self._table = WorldTable(
            self.num_ranks,
            _bounds(limits),
            has_launcher=self._launcher.has_process,
            sees_strangers=self._launcher.sees_ranks,
            watches_leader=lane is None,
            started_at_s=self._loop.time(),
        )
        self._roll = Roll(self.num_ranks, self._launcher, self._look)
        self._first_error: ErrorData | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks_at_s = self._loop.time() + limits.heartbeat_s
        self._is_launched = False
        self._identity: EngineIdentity | None = None
        self._assembled: asyncio.Future[None] = self._loop.create_future()
        self._serving: asyncio.Future[EngineIdentity] = self._loop.create_future()
        self._ended: asyncio.Future[tuple[str, ...]] = self._loop.create_future()
        self._stop: asyncio.Task[tuple[str, ...]] | None = None
        self.dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._lanes = LaneDesk(
            lambda message: self._status.send(0, message), self.dead, limits.call_s_max
        )

    # --- start ----------------------------------------------------------------

    async def start(
        self,
        progress: Callable[[str], None],
        on_assembled: Callable[[], Awaitable[None]] | None = None,
    ) -> EngineIdentity:
        """Raises ConfigError or EngineDeadError; `stop` is next then.

        `on_assembled` is awaited when every rank is there, connected, and has yet to load.
        """
        started_at_s = self._loop.time()
        self._set_timer()  # not even a first HELLO may come
        await self._launcher.launch(self._orders(), self._look)
        self._is_launched = True
        self._look()
        await self._or_death(self._assembled)
        if on_assembled is not None:
            await on_assembled()
        pids = " ".join(map(str, self._roll.all_pids))
        progress(f"engine worker {pids} is up; loading {self._config.model or 'the model'}")
        await self._or_death(self._serving)
        took_s = self._loop.time() - started_at_s
        logger.info("%s: engine worker %s is ready after %.1f s", self.name, pids, took_s)
        progress(f"engine ready after {took_s:.1f} s")
        return self._serving.result()

    async def _or_death(
        self, future: asyncio.Future[None] | asyncio.Future[EngineIdentity]
    ) -> None:
        await asyncio.wait((future, self.dead), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            words = self._first_error
            is_config = words is not None and words.kind == ConfigError.__name__
            raise from_data(words) if words is not None and is_config else self.dead.result()

    def _orders(self) -> list[Orders]:
        return make_orders(
            self._config,
            name=self.name,
            limits=self._limits,
            key=self._key,
            status_endpoint=self._status.endpoint,
            status_curve_key=self._status.curve_key,
            leader_endpoint=self._endpoint("leader") if self._folder is not None else "tcp",
            lane=self._lane,
        )

    def _endpoint(self, name: str) -> str:
        if self._folder is None:
            return f"tcp://{own_address()}:*"
        return self._folder.endpoint(name)

    # --- what is known --------------------------------------------------------

    @property
    def leader(self) -> ProcessName:
        """Rank 0's process; known once the world is up."""
        return self._roll.leader.process

    @property
    def identity(self) -> EngineIdentity:
        return self._serving.result()

    @property
    def is_suspect(self) -> bool:
        """A death was seen, and the cause is not declared yet."""
        return self._table.phase is Phase.SUSPECT

    @property
    def trouble(self) -> str:
        """Which rank is silent, in words; empty while all are heard."""
        return self._table.trouble(self._loop.time())

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks that live on this host, rank 0 first."""
        return self._roll.pids

    @property
    def log_lines(self) -> tuple[str, ...]:
        return self._launcher.log_lines

    @property
    def num_bad_frames(self) -> int:
        return self._status.num_bad_frames

    def has_exited(self) -> bool:
        """Looks now, ahead of the event loop's turn."""
        return self._roll.has_exited()

    def check(self) -> None:
        self._table.check()

    # --- lanes ----------------------------------------------------------------

    async def open_lane(self, spec: LaneSpec) -> LaneSpec:
        """Rank 0's sockets for one more frontend; the spec with the endpoints that were taken.

        Raises RequestError where it cannot be opened, ServerUnavailableError where rank 0 does
        not answer, EngineDeadError after a death.
        """
        return await self._lanes.open(spec)

    def close_lane(self, frontend_id: int, why: str) -> None:
        """Its requests are aborted. Unknown and closed ones are ignored."""
        self._status.send(0, CloseLane(frontend_id, why))

    # --- death ----------------------------------------------------------------

    def give_up(self, why: str) -> None:
        """Kill a world that does not come back; it counts as dead even if it cannot end."""
        self._feed(events.GiveUp(why))

    def kill(self) -> None:
        """End every rank at once; harmless at any time. Its death is then seen as any other."""
        self._roll.kill()

    def _declare(self, cause: str) -> None:
        lines = self._launcher.log_lines[-LINES_IN_MESSAGE_MAX:]
        told = "; its last log lines:\n  " + "\n  ".join(lines) if lines else ""
        self._set_dead(f"the engine of {self.name} is dead: {cause}{told}", is_wanted=False)

    def _set_dead(self, message: str, *, is_wanted: bool) -> None:
        """The first cause wins and stays."""
        if self.dead.done():
            return
        error = EngineDeadError(message)
        if not is_wanted and self._stop is None:
            logger.error("%s", message)
        self.dead.set_result(error)
        self._on_dead(error)

    # --- end ------------------------------------------------------------------

    async def stop(self, *, is_well: bool = True) -> tuple[str, ...]:
        """End it within its bounds, free everything; what leaks, in words. Safe twice."""
        if self._stop is None:
            self._stop = self._loop.create_task(self._stop_all(is_well=is_well))
        return await asyncio.shield(self._stop)

    async def _stop_all(self, *, is_well: bool) -> tuple[str, ...]:
        await asyncio.sleep(0)  # `_stop` is set: what ends from here on was wanted
        self._feed(events.StopAsked(is_well=is_well and not self.trouble))
        leaks = await self._ended if self._is_launched else ()
        self._free()
        return leaks

    def cut(self) -> None:
        """Where the event loop itself ends: ranks are killed, and not waited for."""
        if self._stop is not None:
            self._stop.cancel()
        self.kill()
        self._free()

    def _free(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._status.close()
        self._roll.close()
        if self._folder is not None:
            self._folder.close()
        self._set_dead(f"the engine of {self.name} is dead: {SHUT_DOWN}", is_wanted=True)

    # --- events ---------------------------------------------------------------

    def _on_message(self, rank: int, message: ToOwner) -> None:
        match message:
            case RankHello():
                helloed = self._roll.enter(rank, message)
                if helloed is not None:
                    self._feed(helloed)
            case RankJoined():
                self._feed(events.Heard(rank))
                self._roll.join(rank)
                self._on_connected()
            case RankReady():
                self._identity = message.identity or self._identity
                self._feed(events.Readied(rank))
            case RankBeat():
                self._feed(events.Heard(rank))
                self._status.send(rank, BeatAck())
            case RankDied():
                self._on_died(rank, message.error)
            case RankDone():
                self._feed(events.Done(rank))
            case LaneOpened():
                self._lanes.on_opened(message)
            case LaneClosed():
                self._on_lane_closed(message.frontend_id, message.why)
            case _:
                assert_never(message)

    def _on_died(self, rank: int, error: ErrorData) -> None:
        self._first_error = self._first_error or error
        self._status.send(rank, DiedAck())
        self._feed(events.Died(rank, f"{error.kind}: {error.message}"))

    def _look(self) -> None:
        for gone in self._roll.news():
            self._feed(gone)

    def _tick(self) -> None:
        self._timer = None
        self._ticks_at_s = self._loop.time() + self._limits.heartbeat_s
        self._feed(events.Tick())

    def _feed(self, event: events.Event) -> None:
        for effect in self._table.handle(event, self._loop.time()):
            self._carry_out(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        """A tick every period, and at the table's own deadline."""
        due_s = min(self._ticks_at_s, self._table.deadline_s or self._ticks_at_s)
        if self._timer is not None and self._timer.when() == due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._table.phase not in (Phase.DEAD, Phase.ENDED):
            self._timer = self._loop.call_at(due_s, self._tick)

    # --- effects --------------------------------------------------------------

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Welcome():
                leader = self._roll.leader
                ack = HelloAck(leader.leader_endpoint, leader.leader_curve_key)
                self._status.send(effect.rank, ack)
            case events.AckReady():
                self._status.send(effect.rank, ReadyAck())
            case events.Assembled():
                self._on_connected()
            case events.Serve():
                assert self._identity is not None
                self._serving.set_result(self._identity)
            case events.TellStop():
                self._status.send(0, StopRank())
            case events.TellLeave():
                self._tell_all(Leave())
            case events.KillAll():
                self.kill()
            case events.Declare():
                self._declare(effect.cause)
            case events.End():
                self._ended.set_result(effect.leaks)
            case _:
                assert_never(effect)

    def _tell_all(self, message: ToRank) -> None:
        for rank in range(self.num_ranks):
            self._status.send(rank, message)

    def _on_connected(self) -> None:
        """Once every rank is there and members have joined rank 0: without socket files
        nobody else can come, and a SIGKILL of ours leaves nothing behind."""
        if self._roll.is_complete and not self._assembled.done():
            if self._folder is not None:
                self._folder.close()
            self._assembled.set_result(None)


def _bounds(limits: ExecutorLimits) -> WorldBounds:
    return WorldBounds(
        hello_s_max=limits.hello_s_max,
        load_s_max=limits.load_s_max,
        last_words_s=limits.last_words_s,
        silence_s=limits.health.silence_s,
        give_up_s=limits.health.give_up_s,
        period_s=limits.heartbeat_s,
        stop_live_s_max=limits.stop_live_s_max,
        stop_dead_s_max=limits.stop_dead_s_max,
    )
