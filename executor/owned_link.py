"""The IPC form's link: this process owns the worker, spawned plainly on this host.

Its life as we see it: spawned, HELLO, READY, and one of two ends. Death is seen
by the process monitor, said by the worker itself, or dealt by us. A wanted end
goes through `stop`: the sentinel first; SIGKILL where nobody reads it, or not in
time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from executor.channel import ProxyChannel
from executor.child import WorkerChild
from executor.config import EngineConfig
from executor.engine.seam import EngineIdentity
from executor.lane import OWNER_ID
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from executor.messages import Bootstrap, Hello, Stop, ToProxy, pack_bootstrap

logger = logging.getLogger(__name__)
LINES_IN_MESSAGE_MAX = 8
CONNECT_S_MAX = 1.0
CONNECT_POLL_S = 0.02


class OwnedLink(Link):
    form = "ipc"
    frontend_id = OWNER_ID

    def __init__(
        self, config: EngineConfig, *, name: str, limits: ExecutorLimits, user: LinkUser
    ) -> None:
        super().__init__(name, limits, user)
        self._config = config
        self.channel = ProxyChannel.local(
            limits,
            on_messages=self._on_messages,
            on_crash=self._on_crash,
            num_buckets=config.executor.postprocess_workers,
        )
        self.requests = self.channel.requests
        self._child: WorkerChild | None = None
        self._hello: asyncio.Future[Hello] = self.loop.create_future()

    # --- start ----------------------------------------------------------------

    async def start(self, progress: Callable[[str], None]) -> None:
        limits = self.limits
        started_at_s = self.loop.time()
        self._child = WorkerChild(
            pack_bootstrap(self._bootstrap()),
            name=self.name,
            limits=limits,
            on_exit=self._on_exit,
        )
        hello = await self.within(self._hello, limits.hello_s_max, "start")
        await self._forget_files()
        progress(f"engine worker {hello.pid} is up; loading {self._config.model or 'the model'}")
        await self.within(self._ready, limits.load_s_max, "load its model")
        took_s = self.loop.time() - started_at_s
        logger.info("%s: engine worker %d is ready after %.1f s", self.name, hello.pid, took_s)
        progress(f"engine ready after {took_s:.1f} s")

    async def _forget_files(self) -> None:
        """Before the model loads: a SIGKILL in that long while must leave no file behind.

        The HELLO came by one socket; the other one's connection may be a moment later.
        """
        deadline_s = self.loop.time() + CONNECT_S_MAX
        while not self.channel.forget_files() and self.loop.time() < deadline_s:
            if self.dead.done():
                return
            await asyncio.sleep(CONNECT_POLL_S)

    def _bootstrap(self) -> Bootstrap:
        limits = self.limits
        return Bootstrap(
            config=self._config,
            name=self.name,
            lane=self.channel.spec,
            heartbeat_s=limits.heartbeat_s,
            queue_messages_max=limits.queue_messages_max,
            message_bytes_max=limits.message_bytes_max,
            tombstones_max=limits.tombstones_max,
            parent_pid=os.getpid(),
            dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
        )

    # --- what is known --------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._child is None or self._child.exited.is_set() else (self._child.pid,)

    @property
    def log_lines(self) -> tuple[str, ...]:
        return () if self._child is None else self._child.log_lines

    def counters(self) -> dict[str, int]:
        return {"bad_frames": self.channel.opener.num_bad, "wakes": self.channel.num_wakes}

    def hold(self, is_held: bool) -> bool:
        self.channel.hold(is_held)
        return True

    def has_exited(self) -> bool:
        return self._child is not None and self._child.has_exited()

    # --- what comes from the worker -------------------------------------------

    def _on_messages(self, messages: list[ToProxy]) -> None:
        for message in messages:
            if isinstance(message, Hello) and not self._hello.done():
                self._hello.set_result(message)
        self.user.on_messages(messages)

    def _on_crash(self, error: Exception) -> None:
        self.declare_dead(f"reading its results failed: {type(error).__name__}: {error}")

    def on_ready(self, identity: EngineIdentity) -> None:
        self.channel.forget_files()
        super().on_ready(identity)

    # --- death ----------------------------------------------------------------

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _on_exit(self) -> None:
        if not self.is_stopping:
            self.suspect()

    def describe_death(self) -> list[str]:
        assert self._child is not None
        parts = [self._child.describe_exit()] if self._child.has_exited() else []
        lines = self._child.log_lines[-LINES_IN_MESSAGE_MAX:]
        if lines:
            parts.append("its last log lines:\n  " + "\n  ".join(lines))
        return parts

    # --- end ------------------------------------------------------------------

    async def stop(self, *, is_well: bool) -> tuple[str, ...]:
        reads_its_queue = self._ready.done() and not self.dead.done()
        bound_s = self.limits.stop_live_s_max if is_well else self.limits.stop_dead_s_max
        self.is_stopping = True
        if self._death_timer is not None:
            self._death_timer.cancel()
        leaks: tuple[str, ...] = ()
        if self._child is not None:
            if not (reads_its_queue and await self._stop_by_sentinel(self._child, bound_s)):
                leaks = await self._kill(self._child)
            self._child.close()
        self.declare_dead("it was shut down")
        self.channel.close()
        return leaks

    async def _stop_by_sentinel(self, child: WorkerChild, bound_s: float) -> bool:
        self.requests.put(Stop())
        self.requests.flush()
        if await _wait_for(child.exited, bound_s):
            return True
        logger.warning(
            "%s: the engine's worker %d did not stop within %g s and is killed",
            self.name,
            child.pid,
            bound_s,
        )
        return False

    async def _kill(self, child: WorkerChild) -> tuple[str, ...]:
        child.kill()
        if await _wait_for(child.exited, self.limits.stop_dead_s_max):
            return ()
        return (f"the engine's worker, process {child.pid}, which does not end",)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
