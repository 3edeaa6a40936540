"""The single-process form: the engine and the worker's loop run in a thread of this process.

For debugging, and for what cannot cross a process: logits and logits processors. There
is no process to lose, so the form's deaths are the engine's own: an exception in its loop
is told within one turn of the event loop. What it cannot do: the engine shares the GIL
with whoever streams, a loop that hangs cannot be killed (it is declared dead when it is
given up, its thread is left behind and told as leaked), and whatever ends the engine's
process, an out-of-memory kill or the scripted engine's `exit_token_id`, ends this one.
Settings that belong to a process (torch's threads) are set for all of it.

    started -> loading -> READY -> serving -> Stop read, engine closed -> thread ended
                  |                    |
                  +-- an exception ----+----> last words said, engine closed -> thread ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable

from executor.config import EngineConfig
from executor.engine.factory import create_engine
from executor.engine.seam import Engine
from executor.home import ServingThread
from executor.inbox import Inbox
from executor.lane import OWNER_ID
from executor.last_words import last_words
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from executor.local_lane import InboxSender, LocalAnswers
from executor.messages import Died, Stop, ToProxy
from executor.request_queue import RequestQueue
from executor.worker import Heart, Worker
from protos.errors import ConfigError, describe

logger = logging.getLogger(__name__)
LINES_IN_MESSAGE_MAX = 8
JOIN_S_MAX = 1.0
"""From the engine thread's last statement to its end."""


class EngineThread(ServingThread):
    """`on_end` is called last, on this thread. `inbox` stopped, it ends as soon as it can."""

    def __init__(
        self,
        config: EngineConfig,
        inbox: Inbox,
        answers: LocalAnswers,
        limits: ExecutorLimits,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__("engine")
        self._config = config
        self._inbox = inbox
        self._answers = answers
        self._limits = limits
        self._on_end = on_end
        self.trace: tuple[str, ...] = ()
        """Of the exception that ended it."""

    def run(self) -> None:
        try:
            engine = create_engine(self._config, self._inbox.wake)
        except BaseException as error:
            self._say_died(error)
        else:
            self._serve(engine)
        self._on_end()

    def _serve(self, engine: Engine) -> None:
        limits = self._limits
        try:
            self._run_loop(
                Worker(engine, self._inbox, self._answers, tombstones_max=limits.tombstones_max)
            )
        except BaseException as error:
            self._say_died(error)
        try:
            engine.close()
        except Exception:
            logger.exception("the engine could not be closed")

    def _say_died(self, error: BaseException) -> None:
        """Before anything is closed: closing a broken engine may take its time."""
        if isinstance(error, ConfigError):
            logger.error("%s", error.message)  # the user's to mend
        else:
            self.trace = _lines_of(error)[-self._limits.log_lines_max :]
            logger.error("the engine's thread has failed:\n%s", "\n".join(self.trace))
        self._answers.say(OWNER_ID, Died(last_words(error)))

    def _run_loop(self, worker: Worker) -> None:
        heart = Heart(worker, self._answers, self._limits.heartbeat_s)
        heart.start()
        try:
            worker.run()
        finally:
            heart.stop()


class ThreadLink(Link):
    form = "single"
    is_local = True
    frontend_id = OWNER_ID
    fate = "was left behind, since a thread cannot be killed"

    def __init__(
        self, config: EngineConfig, *, name: str, limits: ExecutorLimits, user: LinkUser
    ) -> None:
        super().__init__(name, limits, user)
        self._config = config
        self._inbox = Inbox(limits.queue_messages_max)
        self._answers = LocalAnswers(
            self.loop,
            messages_max=limits.queue_messages_max,
            on_messages=self._on_messages,
            on_crash=self._on_crash,
        )
        self.requests = RequestQueue(
            InboxSender(self._inbox),
            batch_max=limits.send_batch_max,
            batch_s=limits.send_batch_s,
            loop=self.loop,
        )
        self._ended = asyncio.Event()
        self._thread: EngineThread | None = None

    async def start(self, progress: Callable[[str], None]) -> None:
        logger.warning(
            "%s: the engine runs in this process (executor.form is single): streaming suffers, "
            "because they share one GIL",
            self.name,
        )
        started_at_s = self.loop.time()
        self._thread = EngineThread(
            self._config, self._inbox, self._answers, self.limits, self._tell_end
        )
        self._thread.start()
        progress(f"loading {self._config.model or 'the model'} in this process")
        await self.within(self._ready, self.limits.load_s_max, "load its model")
        progress(f"engine ready after {self.loop.time() - started_at_s:.1f} s")

    # --- what is known --------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    @property
    def log_lines(self) -> tuple[str, ...]:
        return () if self._thread is None else self._thread.trace

    def counters(self) -> dict[str, int]:
        return {"bad_frames": 0, "wakes": self._answers.num_wakes}

    def has_exited(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def _on_messages(self, messages: list[ToProxy]) -> None:
        """What the worker says, it says after it has emptied its inbox: what waits has room."""
        if len(self.requests):
            self.requests.flush()
        self.user.on_messages(messages)

    # --- death ----------------------------------------------------------------

    def kill(self) -> None:
        """All that can be done to a thread: it ends as soon as it comes back."""
        self._inbox.stop()

    def describe_death(self) -> list[str]:
        lines = self.log_lines[-LINES_IN_MESSAGE_MAX:]
        if lines:
            return ["the end of its traceback:\n  " + "\n  ".join(lines)]
        return ["its thread has ended"] if self.has_exited() else []

    def _on_crash(self, error: Exception) -> None:
        logger.error("handling the results crashed", exc_info=error)
        self.declare_dead(f"handling its results failed: {describe(error)}")

    def _tell_end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._on_end)

    def _on_end(self) -> None:
        self._ended.set()
        if not self.is_stopping:
            self.suspect()

    # --- end ------------------------------------------------------------------

    async def stop(self, *, is_well: bool) -> tuple[str, ...]:
        is_serving = self._ready.done() and not self.dead.done()
        self.is_stopping = True
        if self._death_timer is not None:
            self._death_timer.cancel()
        leaks = await self._end_thread(is_well=is_well and is_serving)
        self._free()
        return leaks

    def cut(self) -> None:
        self.is_stopping = True
        self._inbox.stop()
        self._free()

    def _free(self) -> None:
        self.declare_dead("it was shut down")
        self._answers.close()
        self.requests.close()

    async def _end_thread(self, *, is_well: bool) -> tuple[str, ...]:
        if self._thread is None:
            return ()
        if is_well:
            self.requests.put(Stop())
            self.requests.flush()
        else:
            self._inbox.stop()
        bound_s = self.limits.stop_live_s_max if is_well else self.limits.stop_dead_s_max
        if await self._has_ended_within(bound_s):
            self._thread.join(JOIN_S_MAX)
            return ()
        self._inbox.stop()  # so that it ends at last, should it ever come back
        what = "serves" if self._ready.done() else "loads its model"
        return (f"the engine's thread, which still {what} after {bound_s:g} s",)

    async def _has_ended_within(self, bound_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), bound_s)
        except TimeoutError:
            return False
        return True


def _lines_of(error: BaseException) -> tuple[str, ...]:
    text = "".join(traceback.format_exception(error))
    return tuple(line for line in text.splitlines() if line.strip())
