"""Several frontends on one engine: the launcher owns the engine, the port and their lives.

    port held, frontends started (they answer "starting") -> engine loading
      -> every frontend attached and ready -> ready
      -> a frontend dies: its streams end, its requests are aborted, another takes its seat
      -> SIGTERM or SIGINT: frontends drain, then the engine stops      -> exit 0
      -> the engine dies: frontends tell their clients and end          -> exit 70

The port is shared by SO_REUSEPORT: a connection belongs to one frontend. The launcher's own death
ends the engine and asks every frontend to stop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from common.logs import Logs
from common.process import (
    EXIT_CONFIG,
    EXIT_ENGINE_DEAD,
    EXIT_OK,
    ProcessOptions,
    StopSignals,
    tell_ready,
)
from common.rpc import hold_port
from common.security import load_secret
from executor.attach.broker import Broker
from executor.attach.owner import share_engine
from executor.limits import ExecutorLimits
from executor.preflight import check_model
from executor.proxy import Proxy
from executor.world.orders import ProcessName
from protos.errors import BatonError, EngineDeadError
from serving.config import ServerConfig
from serving.front import FrontOrders, pack_orders
from serving.front_child import FrontChild
from serving.restarts import Restarts

FAILED_STARTS_MAX = 3
"""In a row, of one seat, before the server was ever ready."""
STANDSTILL_S = 3.0
"""How long a frontend that has lost its lane may take to notice and end."""
ENDING_S_MAX = 8.0
"""From the engine's death, or past the grace, to SIGKILL of a frontend that is there still."""
EXECUTOR_STOP_S_MAX = 30.0


class FrontendsProcess:
    """One life; `run` is called once, on the main thread's event loop."""

    def __init__(self, config: ServerConfig, program: str, options: ProcessOptions) -> None:
        """`program` is the module that runs a frontend. Raises ConfigError."""
        load_secret(Path(config.secret_file))  # told here, once
        self._config = config
        self._program = program
        self._options = options
        level = options.log_level or config.log_level
        self.logs = Logs(name=config.name, level=level, format=config.log_format)
        self._log = self.logs.get("launcher")
        self._seats = [Restarts() for _ in range(config.frontends)]
        self._fronts: dict[int, FrontChild] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._failed: asyncio.Future[int] | None = None
        self._all_ready: asyncio.Event | None = None
        self._was_ready = False
        self._is_stopping = False
        self._is_dead = False

    async def run(self) -> int:
        """The exit status. Raises ConfigError or EngineDeadError where the start fails."""
        config = self._config
        await asyncio.to_thread(check_model, config.engine_here(), "engine.model")
        holder, self._listen = hold_port(config.listen)
        limits = ExecutorLimits.of(config.engine)
        with holder:
            self._broker = Broker.on_ipc(limits)
            try:
                with StopSignals() as signals:
                    return await self._serve(limits, signals.stopping)
            finally:
                await self._broker.close()
                self._log.info("stopped", **self._broker.counters())

    async def _serve(self, limits: ExecutorLimits, stopping: asyncio.Event) -> int:
        self._failed = asyncio.get_running_loop().create_future()
        self._all_ready = asyncio.Event()
        self._broker.on_lost = self._on_lost
        num = len(self._seats)
        self._log.info("starting", listen=self._listen, frontends=num)
        for index in range(num):
            self._spawn(index)
        stop = asyncio.create_task(stopping.wait())
        executor: Proxy | None = None
        try:
            start = asyncio.create_task(self._start_engine(limits))
            await self._first(start, stop, self._failed)
            if not start.done():
                start.cancel()
                outcome = (await asyncio.gather(start, return_exceptions=True))[0]
                executor = outcome if isinstance(outcome, Proxy) else None
                return self._outcome()
            executor = start.result()
            return await self._until_end(executor, stop)
        finally:
            stop.cancel()
            await self._end_fronts(asks=executor is None or not self._is_dead)
            if executor is not None:
                await self._shut(executor)

    async def _start_engine(self, limits: ExecutorLimits) -> Proxy:
        return await share_engine(
            self._config.engine_here(),
            self._broker,
            name=self._config.name,
            limits=limits,
            progress=lambda what: self._log.info("progress", what=what),
        )

    async def _until_end(self, executor: Proxy, stop: asyncio.Task[bool]) -> int:
        assert self._failed is not None
        assert self._all_ready is not None
        death = asyncio.create_task(executor.wait_dead())
        ready = asyncio.create_task(self._all_ready.wait())
        try:
            await self._first(death, stop, self._failed, ready)
            if ready.done() and not (death.done() or stop.done() or self._failed.done()):
                self._was_ready = True
                self._log.info("ready", name=self._config.name, listen=self._listen)
                tell_ready(self._options.ready_fd, self._listen)
                await self._first(death, stop, self._failed)
            if death.done():
                self._is_dead = True
                self._tell_death(death.result())
                return EXIT_ENGINE_DEAD
            return self._outcome()
        finally:
            for task in (death, ready):
                task.cancel()
            await asyncio.gather(death, ready, return_exceptions=True)

    def _outcome(self) -> int:
        """Of an end that was not the engine's."""
        assert self._failed is not None
        if self._failed.done():
            return self._failed.result()
        self._log.info("stopping")
        return EXIT_OK

    def _tell_death(self, error: EngineDeadError) -> None:
        cause, *lines = error.message.splitlines()
        self._log.error("engine_dead", error=cause)
        for line in lines:
            self._log.error("worker_said", line=line.strip())

    @staticmethod
    async def _first(*futures: asyncio.Future[Any]) -> None:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

    # --- frontends ------------------------------------------------------------

    def _spawn(self, index: int) -> None:
        self._timers.pop(index, None)
        options = self._options
        arguments = ["--config", str(options.config)]
        if options.log_level is not None:
            arguments += ["--log-level", options.log_level]
        orders = FrontOrders.of(self._config, index, self._listen, self._broker.local_point())
        try:
            front = FrontChild(
                index,
                self._program,
                arguments,
                pack_orders(orders),
                on_ready=self._on_ready,
                on_exit=self._on_exit,
            )
        except OSError as error:  # no process, memory or descriptor is left for one now
            again_in_s = self._seats[index].delay_s(0.0)
            self._log.error("frontend_not_started", index=index, error=str(error))
            loop = asyncio.get_running_loop()
            self._timers[index] = loop.call_later(again_in_s, self._spawn, index)
            return
        self._fronts[index] = front
        self._log.info("frontend_started", index=index, pid=front.pid)

    def _on_ready(self, front: FrontChild) -> None:
        self._log.info("frontend_ready", index=front.index, pid=front.pid)
        fronts = self._fronts.values()
        assert self._all_ready is not None
        if len(fronts) == len(self._seats) and all(each.is_ready for each in fronts):
            self._all_ready.set()

    def _on_exit(self, front: FrontChild) -> None:
        front.close()
        if self._is_stopping or self._fronts.get(front.index) is not front:
            return
        del self._fronts[front.index]
        seat = self._seats[front.index]
        loop = asyncio.get_running_loop()
        delay_s = seat.delay_s(loop.time() - front.started_at_s)
        if not self._was_ready and self._gives_up(front, seat):
            return
        self._log.error(
            "frontend_died",
            index=front.index,
            pid=front.pid,
            how=front.describe_exit(),
            again_in_s=round(delay_s, 1),
        )
        self._timers[front.index] = loop.call_later(delay_s, self._spawn, front.index)

    def _gives_up(self, front: FrontChild, seat: Restarts) -> bool:
        """What no frontend can start with ends the server."""
        assert self._failed is not None
        is_config = front.status == EXIT_CONFIG
        if not is_config and seat.num_in_a_row < FAILED_STARTS_MAX:
            return False
        self._log.error("frontend_cannot_start", index=front.index, how=front.describe_exit())
        if not self._failed.done():
            self._failed.set_result(EXIT_CONFIG if is_config else EXIT_ENGINE_DEAD)
        return True

    def _on_lost(self, process: ProcessName) -> None:
        """A healthy one ends by itself now; one that stands still would keep its connections."""
        for front in self._fronts.values():
            if front.pid == process.pid and not front.exited.is_set():
                asyncio.get_running_loop().call_later(STANDSTILL_S, self._kill_if_there, front)

    def _kill_if_there(self, front: FrontChild) -> None:
        if not self._is_stopping and not front.exited.is_set():
            self._log.error("frontend_stands_still", index=front.index, pid=front.pid)
            front.kill()

    # --- the end --------------------------------------------------------------

    async def _end_fronts(self, *, asks: bool) -> None:
        """Each drains by itself when asked, and at the engine's death unasked; whoever is there
        still is killed."""
        self._is_stopping = True
        for timer in self._timers.values():
            timer.cancel()
        fronts = list(self._fronts.values())
        for front in fronts:
            if asks and not front.exited.is_set():
                front.terminate()
        bound_s = self._config.shutdown_grace_s + ENDING_S_MAX
        late = await self._wait(fronts, bound_s)
        for front in late:
            self._log.error("frontend_killed", index=front.index, pid=front.pid)
            front.kill()
        for front in await self._wait(late, ENDING_S_MAX):
            self._log.error("frontend_left_behind", index=front.index, pid=front.pid)
        for front in fronts:
            front.close()

    @staticmethod
    async def _wait(fronts: list[FrontChild], bound_s: float) -> list[FrontChild]:
        """Those that have not ended by then."""
        waits = [asyncio.create_task(front.exited.wait()) for front in fronts]
        if waits:
            await asyncio.wait(waits, timeout=bound_s)
        for wait in waits:
            wait.cancel()
        return [front for front in fronts if not front.exited.is_set()]

    async def _shut(self, executor: Proxy) -> None:
        try:
            await asyncio.wait_for(executor.shutdown(), EXECUTOR_STOP_S_MAX)
        except (BatonError, TimeoutError) as error:
            self._log.error("executor_left_behind", error=str(error) or type(error).__name__)
