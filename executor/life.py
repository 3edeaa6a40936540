"""The worker's life as the proxy sees it: spawned, HELLO, READY, and one of two ends.

Death is seen by the process monitor, said by the worker itself, or dealt by us
(`give_up`). Detection (`_on_exit`, `on_died`) only makes it suspect: from then
on nothing is accepted, and for a moment its last words are still read. Handling
then declares the first cause, once, to `on_dead`. A wanted end goes through
`stop`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from executor.channel import ProxyChannel
from executor.child import WorkerChild
from executor.config import EngineConfig
from executor.engine.seam import EngineIdentity
from executor.limits import ExecutorLimits
from executor.messages import Bootstrap, Hello, Stop, pack_bootstrap
from protos.errors import BatonError, ConfigError, EngineDeadError, ErrorData, from_data

logger = logging.getLogger(__name__)
T = TypeVar("T")
LINES_IN_MESSAGE_MAX = 8
CONNECT_S_MAX = 1.0
CONNECT_POLL_S = 0.02


class WorkerLife:
    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        limits: ExecutorLimits,
        channel: ProxyChannel,
        on_dead: Callable[[EngineDeadError], None],
    ) -> None:
        self._config = config
        self._name = name
        self._limits = limits
        self._channel = channel
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._child: WorkerChild | None = None
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._ready: asyncio.Future[EngineIdentity] = self._loop.create_future()
        self.dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._last_words: ErrorData | None = None
        self._given_up = ""
        self._death_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    # --- start ----------------------------------------------------------------

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ConfigError or EngineDeadError; the caller then stops and closes."""
        limits = self._limits
        started_at_s = self._loop.time()
        self._child = WorkerChild(
            pack_bootstrap(self._bootstrap()),
            name=self._name,
            limits=limits,
            on_exit=self._on_exit,
        )
        hello = await self._within(self._hello, limits.hello_s_max, "start")
        await self._forget_files()
        progress(f"engine worker {hello.pid} is up; loading {self._config.model or 'the model'}")
        await self._within(self._ready, limits.load_s_max, "load its model")
        took_s = self._loop.time() - started_at_s
        logger.info("%s: engine worker %d is ready after %.1f s", self._name, hello.pid, took_s)
        progress(f"engine ready after {took_s:.1f} s")

    async def _forget_files(self) -> None:
        """Before the model loads: a SIGKILL in that long while must leave no file behind.

        The HELLO came by one socket; the other one's connection may be a moment later.
        """
        deadline_s = self._loop.time() + CONNECT_S_MAX
        while not self._channel.forget_files() and self._loop.time() < deadline_s:
            if self.dead.done():
                return
            await asyncio.sleep(CONNECT_POLL_S)

    def _bootstrap(self) -> Bootstrap:
        limits = self._limits
        return Bootstrap(
            config=self._config,
            name=self._name,
            key=self._channel.key,
            requests_endpoint=self._channel.requests_endpoint,
            results_endpoint=self._channel.results_endpoint,
            heartbeat_s=limits.heartbeat_s,
            queue_messages_max=limits.queue_messages_max,
            message_bytes_max=limits.message_bytes_max,
            tombstones_max=limits.tombstones_max,
            parent_pid=os.getpid(),
            dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
        )

    async def _within(self, future: asyncio.Future[T], timeout_s: float, what: str) -> T:
        """The future's value, unless the worker dies first or time runs out."""
        await asyncio.wait(
            (future, self.dead), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if future.done():
            return future.result()
        if self.dead.done():
            raise self._start_error()
        raise EngineDeadError(f"the engine's worker did not {what} within {timeout_s:g} s")

    def _start_error(self) -> BatonError:
        words = self._last_words
        if words is not None and words.kind == ConfigError.__name__:
            return from_data(words)
        return self.dead.result()

    # --- what is known --------------------------------------------------------

    @property
    def identity(self) -> EngineIdentity:
        return self._ready.result()

    @property
    def is_loaded(self) -> bool:
        return self._ready.done()

    @property
    def is_suspect(self) -> bool:
        """Its death was seen, and the cause is not declared yet."""
        return self._death_timer is not None and not self.dead.done()

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._child is None or self._child.exited.is_set() else (self._child.pid,)

    @property
    def log_lines(self) -> tuple[str, ...]:
        return () if self._child is None else self._child.log_lines

    def has_exited(self) -> bool:
        """Looks now, ahead of the monitor's turn on the event loop."""
        return self._child is not None and self._child.has_exited()

    # --- what comes from the worker -------------------------------------------

    def on_hello(self, hello: Hello) -> None:
        if not self._hello.done():
            self._hello.set_result(hello)

    def on_ready(self, identity: EngineIdentity) -> None:
        if not self._ready.done():
            self._channel.forget_files()
            self._ready.set_result(identity)

    def on_died(self, error: ErrorData) -> None:
        self._last_words = self._last_words or error
        self._suspect()

    # --- death ----------------------------------------------------------------

    def give_up(self, why: str) -> None:
        """Kill a worker that does not come back; it counts as dead even if it cannot end."""
        if self._child is None or self._is_stopping or self._given_up:
            return
        self._given_up = why
        self._child.kill()
        self._suspect()

    def _on_exit(self) -> None:
        if not self._is_stopping:
            self._suspect()

    def _suspect(self) -> None:
        if self._death_timer is None and not self.dead.done():
            self._death_timer = self._loop.call_later(self._limits.last_words_s, self._handle)

    def _handle(self) -> None:
        assert self._child is not None
        parts = [self._given_up] if self._given_up else []
        if self._last_words is not None:
            parts.append(f"{self._last_words.kind}: {self._last_words.message}")
        if self._child.has_exited():
            parts.append(self._child.describe_exit())
        lines = self._child.log_lines[-LINES_IN_MESSAGE_MAX:]
        if lines:
            parts.append("its last log lines:\n  " + "\n  ".join(lines))
        self.declare_dead("; ".join(parts))

    def declare_dead(self, cause: str) -> None:
        """The first cause wins and stays."""
        if self.dead.done():
            return
        error = EngineDeadError(f"the engine of {self._name} is dead: {cause}")
        if not self._is_stopping:
            logger.error("%s", error.message)
        self.dead.set_result(error)
        self._on_dead(error)

    # --- end ------------------------------------------------------------------

    async def stop(self) -> None:
        """The sentinel first; SIGKILL where nobody reads it, or not in time. Then all is freed."""
        self._is_stopping = True
        if self._death_timer is not None:
            self._death_timer.cancel()
        if self._child is not None:
            if not await self._stop_by_sentinel(self._child):
                await self._kill(self._child)
            self._child.close()
        self.declare_dead("it was shut down")

    async def _stop_by_sentinel(self, child: WorkerChild) -> bool:
        if not self._ready.done() or self.dead.done():
            return False
        self._channel.requests.put(Stop())
        if await _wait_for(child.exited, self._limits.stop_s_max):
            return True
        logger.warning(
            "%s: the engine's worker %d did not stop within %g s and is killed",
            self._name,
            child.pid,
            self._limits.stop_s_max,
        )
        return False

    async def _kill(self, child: WorkerChild) -> None:
        child.kill()
        if not await _wait_for(child.exited, self._limits.stop_s_max):
            logger.error("%s: the engine's worker %d does not end: it leaks", self._name, child.pid)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
