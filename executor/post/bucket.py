"""One bucket at the frontend: its life, its window, and the worker that serves it now.

What its states are is in life.py, what is on its way to the worker in window.py.
Here is the shell: a worker is spawned, heard, found dead or overdue, let go and
replaced. A dead worker is disconnected at once and closed when it has exited.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass
from typing import Protocol

import zmq

from executor.limits import ExecutorLimits
from executor.packing import body_bytes_max
from executor.post.life import BucketLife, BucketState, Next
from executor.post.messages import Answer, Counts, Died, FromPost, Hello, Ready
from executor.post.spec import TokenizerSpec
from executor.post.watch import RestartBudget
from executor.post.window import BucketWindow
from executor.post.worker import PostWorker
from executor.postprocess import TextParams
from protos.errors import ConfigError, ErrorData, describe

logger = logging.getLogger(__name__)
LINES_IN_LOG_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PostSettings:
    context: zmq.Context[zmq.Socket[bytes]]
    tokenizer: TokenizerSpec
    name: str
    limits: ExecutorLimits


class BucketOwner(Protocol):
    def on_ready(self) -> None: ...

    def on_answer(self, answer: Answer) -> None: ...

    def on_lost(self, bucket: PostBucket, cause: str, payloads: list[bytes]) -> None:
        """All that was open is lost, mostly by a death; `payloads` were never answered."""


class PostBucket:
    def __init__(self, index: int, settings: PostSettings, owner: BucketOwner) -> None:
        limits = settings.limits.post
        self.index = index
        self.last_words: ErrorData | None = None
        self.life = BucketLife(RestartBudget(limits.restarts_max, limits.restarts_window_s))
        self._bytes_max = body_bytes_max(settings.limits.message_bytes_max)
        self.window = BucketWindow(limits, self._bytes_max)
        self._settings = settings
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._worker: PostWorker | None = None
        self._leaving: list[PostWorker] = []
        self._start_timer: asyncio.TimerHandle | None = None
        self._counts = Counts()
        self._past = Counts()
        self._num_bad_frames = 0
        self._num_strange = 0

    # --- use --------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None or worker.exited.is_set() else worker.pid

    @property
    def is_in_process(self) -> bool:
        return self.life.state is BucketState.IN_PROCESS

    def open(self, client_id: int, params: TextParams) -> bool:
        """Raises InvalidRequestError where no message to a worker could hold them."""
        if self.life.state in (BucketState.IN_PROCESS, BucketState.STOPPED):
            return False
        self.window.open(client_id, params)
        return True

    def forget(self, client_id: int) -> None:
        self.window.forget(client_id)
        self._send()

    def put(self, payload: bytes) -> None:
        """A starting worker's requests wait; where too much would wait, they fail."""
        self.window.put(payload)
        self._send()
        if self.window.is_full and self.life.state is BucketState.STARTING:
            cause = "the postprocess worker is still starting, and too much waits for it"
            self._owner.on_lost(self, cause, self._new_window())

    def counters(self) -> dict[str, int]:
        worker_bad_frames = 0 if self._worker is None else self._worker.num_bad_frames
        return {
            "workers": int(self.pid is not None),
            "deaths": self.life.num_deaths,
            "in_process": int(self.is_in_process),
            "live": self._counts.live,
            "late": self._past.late + self._counts.late,
            "malformed": self._past.malformed + self._counts.malformed,
            "worker_bad_frames": self._past.bad_frames + self._counts.bad_frames,
            "bad_frames": self._num_bad_frames + worker_bad_frames,
            "strange_answers": self._num_strange + self.window.num_strange,
        }

    def check(self) -> None:
        """Raises AssertionError where its books do not balance."""
        self.window.check()
        if self.is_in_process:
            assert self._worker is None
            assert self.window.num_in_flight == self.window.backlog_bytes == 0

    # --- the worker's life --------------------------------------------------------

    def spawn(self) -> None:
        settings, incarnation = self._settings, self.life.incarnation
        self.last_words = None
        try:
            self._worker = PostWorker(
                settings.context,
                settings.tokenizer,
                name=f"{settings.name} post {self.index}",
                limits=settings.limits,
                on_messages=functools.partial(self._on_messages, incarnation),
                on_crash=functools.partial(self._on_crash, incarnation),
                on_exit=functools.partial(self._on_exit, incarnation),
            )
        except (OSError, ConfigError) as error:
            self._die(f"it cannot be started: {error}")
            return
        start_s_max = settings.limits.post.start_s_max
        why = f"it did not load its tokenizer within {start_s_max:g} s"
        self._start_timer = self._loop.call_later(start_s_max, self.give_up, why)

    def give_up(self, why: str) -> None:
        """Kill it; it counts as dead even if it cannot end."""
        if self._worker is not None:
            self._worker.kill()
            process = f"the postprocess worker (process {self._worker.pid})"
            self._die(f"{process} was killed: {why}")

    async def stop(self) -> None:
        """Bounded; what does not end leaks and is said."""
        self.life.stop()
        self._cancel_start_timer()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end_input()
            self._leaving.append(worker)
        await asyncio.gather(*(self._end(worker) for worker in self._leaving))
        self._leaving.clear()

    def cut(self) -> None:
        """At once, also in the midst of `stop`; safe after it."""
        self.life.stop()
        self._cancel_start_timer()
        held = [] if self._worker is None else [self._worker]
        for worker in (*held, *self._leaving):
            worker.kill()
            worker.close()

    async def _end(self, worker: PostWorker) -> None:
        name, stop_s_max = self._settings.name, self._settings.limits.post.stop_s_max
        if not await _within(worker.exited, stop_s_max):
            logger.warning(
                "%s: postprocess worker %d is killed: it does not stop", name, worker.pid
            )
            worker.kill()
            if not await _within(worker.exited, stop_s_max):
                logger.error("%s: postprocess worker %d does not end: it leaks", name, worker.pid)
        worker.close()

    def _on_exit(self, incarnation: int) -> None:
        for worker in [worker for worker in self._leaving if worker.exited.is_set()]:
            self._leaving.remove(worker)
            worker.close()
        if self._worker is None or incarnation != self.life.incarnation:
            return
        cause = self._worker.describe_exit()
        words = self.last_words
        self._die(cause if words is None else f"{words.kind}: {words.message}; {cause}")

    def _on_crash(self, incarnation: int, error: Exception) -> None:
        if incarnation == self.life.incarnation:
            self.give_up(f"handling its answers failed: {describe(error)}")

    def _die(self, cause: str) -> None:
        what_next = self.life.on_death(cause, self._loop.time())
        if what_next is Next.NOTHING:
            return
        name = self._settings.name
        lines = () if self._worker is None else self._worker.log_lines[-LINES_IN_LOG_MAX:]
        told = "".join(f"\n  {line}" for line in lines)
        logger.error("%s: bucket %d: %s%s", name, self.index, cause, told)
        payloads = self._let_go()
        self._owner.on_lost(self, cause, payloads)
        if self.life.state is BucketState.STARTING:
            self.spawn()
        elif self.is_in_process:
            logger.error(
                "%s: bucket %d: its workers died %d times; this process makes its text from now on",
                name,
                self.index,
                self.life.num_deaths,
            )

    def _let_go(self) -> list[bytes]:
        """What was never answered."""
        self._cancel_start_timer()
        payloads = self._new_window()
        self._past = Counts(
            late=self._past.late + self._counts.late,
            malformed=self._past.malformed + self._counts.malformed,
            bad_frames=self._past.bad_frames + self._counts.bad_frames,
        )
        self._counts = Counts()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._num_bad_frames += worker.num_bad_frames
            worker.disconnect()
            if worker.exited.is_set():
                worker.close()
            else:
                self._leaving.append(worker)
        return payloads

    def _new_window(self) -> list[bytes]:
        """For the next worker, or one that has not begun. What the old one still held."""
        payloads = self.window.retire()
        self._num_strange += self.window.num_strange
        self.window = BucketWindow(self._settings.limits.post, self._bytes_max)
        return payloads

    def _cancel_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None

    # --- traffic ------------------------------------------------------------------

    def _send(self) -> None:
        if self._worker is None or self.life.state is not BucketState.SERVING:
            return
        while (work := self.window.take(self._loop.time())) is not None:
            if not self._worker.send(work):  # it is gone, which we hear of in a moment
                return

    def _on_messages(self, incarnation: int, messages: list[FromPost]) -> None:
        for message in messages:
            if self._worker is None or incarnation != self.life.incarnation:
                return
            self._on_message(self._worker, message)

    def _on_message(self, worker: PostWorker, message: FromPost) -> None:
        match message:
            case Answer():
                self._counts = message.counts
                now_s, is_part = self._loop.time(), message.is_part
                if self.window.on_answer(message.number, now_s, is_part=is_part):
                    self._send()
                    self._owner.on_answer(message)
            case Hello():
                worker.forget_files()
            case Ready():
                worker.forget_files()
                self._cancel_start_timer()
                if self.life.on_ready():
                    self._send()
                    self._owner.on_ready()
            case Died():
                self.last_words = message.error


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
