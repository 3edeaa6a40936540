"""An executor on an event loop of its own, in a thread of its own: what an `LLM` stands on.

    starting ── the engine is ready ──> serving ── stop ──> stopping ──> ended
        └── it cannot start: the error is raised where `start` waits ──> ended

Whatever happens to the engine happens on the thread's loop; other threads ask
by calls that never wait for it (`submit`, `stop`'s first half). So a program
that has a loop of its own, or none, is served alike, and a stop can be asked
for from anywhere: twice, at exit, in a signal handler, under a dead engine, and
by the garbage collector on the very thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from baton.line import Entry, Line
from executor.executor import GenerationExecutor
from executor.home import Home, is_needed_here
from protos.errors import ServerUnavailableError

logger = logging.getLogger(__name__)
T = TypeVar("T")
STOP_S_MAX = 200.0
"""More than the executor takes at worst: it abandons what it cannot end."""
OVER = "this LLM is shut down"


class EngineThread:
    """`create` makes the executor, on the thread's loop; `room` is how many requests it may
    hold at once."""

    def __init__(
        self, create: Callable[[], Coroutine[Any, Any, GenerationExecutor]], *, name: str, room: int
    ) -> None:
        self._create = create
        self._name = name
        self._room = room
        self._pid = os.getpid()
        self._stopping = asyncio.Event()
        self._has_loop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: Line | None = None
        self._started: concurrent.futures.Future[tuple[GenerationExecutor, Home]] = (
            concurrent.futures.Future()
        )
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)

    def start(self) -> tuple[GenerationExecutor, Home]:
        """Waits for the engine. Raises ConfigError, EngineDeadError; all is freed then."""
        self._thread.start()
        try:
            self._has_loop.wait()
            return self._started.result()
        except BaseException:
            self.stop()
            raise

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, entry: Entry) -> None:
        """From any thread. Raises ServerUnavailableError after a stop, and in a forked child."""
        if os.getpid() != self._pid:
            raise ServerUnavailableError("this LLM belongs to the process that forked this one")
        if self._stopping.is_set() or self._loop is None or self._line is None:
            raise ServerUnavailableError(OVER)
        try:
            self._loop.call_soon_threadsafe(self._line.add, entry)
        except RuntimeError:  # closed since
            raise ServerUnavailableError(OVER) from None

    def run(self, ask: Callable[[], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Ask the executor something, on its loop. Raises as `submit`; a stop cancels it."""
        if os.getpid() != self._pid or self._stopping.is_set() or self._loop is None:
            raise ServerUnavailableError(OVER)

        async def asked() -> T:
            return await ask()

        coroutine = asked()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # closed since
            coroutine.close()
            raise ServerUnavailableError(OVER) from None

    def stop(self) -> bool:
        """Ask for the end, and wait for it where it does not wait for us. False: it leaks."""
        if os.getpid() != self._pid or self._loop is None:
            return True
        try:
            self._loop.call_soon_threadsafe(self._stopping.set)
        except RuntimeError:  # closed: it has ended
            return True
        if is_needed_here(self._thread):
            return True
        self._thread.join(STOP_S_MAX)
        if self._thread.is_alive():
            logger.error(
                "%s: its thread does not end within %g s: it leaks", self._name, STOP_S_MAX
            )
            return False
        return True

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._has_loop.set()
                runner.run(self._live())
        except BaseException as error:
            if self._started.done():
                logger.exception("%s: its event loop broke", self._name)
            else:
                self._started.set_exception(error)
        finally:
            self._has_loop.set()

    async def _live(self) -> None:
        executor = await self._create_or_stop()
        self._line = Line(executor.submit, room=self._room)
        try:
            self._started.set_result((executor, Home.here()))
            await self._stopping.wait()
        finally:
            self._line.close(ServerUnavailableError(OVER))
            await executor.shutdown()

    async def _create_or_stop(self) -> GenerationExecutor:
        """Raises ServerUnavailableError where it is stopped meanwhile."""
        create = asyncio.create_task(self._create())
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((create, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if create.done():
            return create.result()
        create.cancel()
        outcome = (await asyncio.gather(create, return_exceptions=True))[0]
        if isinstance(outcome, GenerationExecutor):  # it was up before the cancel reached it
            await outcome.shutdown()
        raise ServerUnavailableError(OVER)
