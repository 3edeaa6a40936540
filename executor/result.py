"""A request's answer, as its consumers read it: piece by piece, whole, or both.

    for chunk in result / async for chunk in result     chunks, as they come
    result.result() / await result                      the whole, as often as wanted

Life: chunks are pushed at home (the event loop that owns the executor); then
exactly one end, `finish` in the last chunk or an error. The end is sticky: the
same error object, or the same answer, however often it is asked for.

Consumers may sit at home, on another event loop, or on a plain thread. Only a
blocking call at home is refused: it would wait for itself. Iterators of one
result share one place in it: each chunk is read once.

A slow consumer costs no more than the answer itself, which `max_tokens` bounds
(executor/answer.py keeps it once), and slows nobody; `max_unread_tokens` ends
the request of one that falls further behind.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeAlias

from executor.answer import Answer, ResultChunk
from executor.engine.local import LocalOutput
from executor.home import Home
from protos.checks import invalid
from protos.completion import Completion, timing_of
from protos.errors import (
    BatonError,
    RequestCancelledError,
    ServerUnavailableError,
    SlowConsumerError,
    WrongThreadError,
)

if TYPE_CHECKING:
    from executor.request import ExecutorRequest

__all__ = ["GenerationResult", "ResultChunk"]
LOOK_S = 1.0
"""How often who waits elsewhere looks whether the home is still there."""
Waiter: TypeAlias = "asyncio.Future[None] | queue.SimpleQueue[None]"


class GenerationResult:
    """See the module's docstring. `push`, `fail` and `pass_on_to` are the executor's, at home."""

    __slots__ = (
        "__weakref__",
        "_abort",
        "_answer",
        "_completion",
        "_end_waiters",
        "_ended_s",
        "_error",
        "_first_token_s",
        "_home",
        "_home_waiter",
        "_is_ended",
        "_lock",
        "_overrun",
        "_request",
        "_started_s",
        "_successor",
        "_unread_max",
        "_waiters",
        "client_id",
        "on_end",
    )

    def __init__(
        self,
        client_id: int,
        abort: Callable[[int], None],
        *,
        home: Home | None = None,
        request: ExecutorRequest | None = None,
        max_unread_tokens: int = 0,
    ) -> None:
        """`request`: what the whole answer repeats of it. `max_unread_tokens` 0: no limit."""
        self.client_id = client_id
        self.on_end: Callable[[GenerationResult], None] | None = None
        """Called at home, once, when the end is known. Set it before the request can end."""
        self._abort = abort
        self._home = home or Home.here()
        self._request = request
        self._unread_max = max_unread_tokens
        self._lock = threading.Lock()
        self._answer = Answer()
        self._is_ended = False
        self._error: BatonError | None = None
        self._overrun: SlowConsumerError | None = None
        self._completion: Completion | None = None
        self._home_waiter: asyncio.Future[None] | None = None
        """The reader at home, of whom there is mostly one; others are among `_waiters`."""
        self._waiters: list[Waiter] = []
        self._end_waiters: list[Waiter] = []
        self._successor: GenerationResult | None = None
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._ended_s = self._started_s

    @property
    def is_ended(self) -> bool:
        """Whether the end is known, read or not."""
        return self._is_ended if self._successor is None else self._successor.is_ended

    @property
    def error(self) -> BatonError | None:
        """What ended it, where it failed; None while it runs and where it finished."""
        return self._error if self._successor is None else self._successor.error

    @property
    def num_merged(self) -> int:
        """Chunks that came while an older one was unread."""
        return self._answer.num_merged

    def abort(self) -> None:
        """Ask for the request's end; it comes as RequestCancelledError. Harmless later.

        From any thread.
        """
        self._home.call(self._abort, self.client_id)

    # --- the executor's side, at home -------------------------------------------

    def push(self, chunk: ResultChunk) -> None:
        if self._successor is not None:
            self._successor.push(chunk)
            return
        is_end = chunk.finish is not None
        if self._first_token_s is None and chunk.token_ids:
            self._first_token_s = time.monotonic()
        with self._lock:
            assert not self._is_ended, "a second answer"
            self._answer.add(chunk)
            waiter, self._home_waiter = self._home_waiter, None
            others = self._take_waiters(is_end=is_end) if is_end or self._waiters else ()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if others:
            self._wake(others)
        if is_end:
            self._tell_end()
        elif self._unread_max and self._answer.num_unread_tokens > self._unread_max:
            self._overrun_by(self._answer.num_unread_tokens)

    def add_logits(self, logits: LocalOutput) -> int:
        """Before the chunk that they belong to; the bytes they take, for as long as this lives."""
        if self._successor is not None:
            return self._successor.add_logits(logits)
        return self._answer.add_logits(logits)

    def fail(self, error: BatonError) -> None:
        """What was pushed before is still read first, piece by piece."""
        if self._successor is not None:
            self._successor.fail(error)
            return
        if self._overrun is not None and isinstance(error, RequestCancelledError):
            error = self._overrun
        with self._lock:
            assert not self._is_ended, "a second answer"
            self._error = error
            waiters = self._take_waiters(is_end=True)
            if self._home_waiter is not None:
                waiters.append(self._home_waiter)
                self._home_waiter = None
        self._wake(waiters)
        self._tell_end()

    def pass_on_to(self, successor: GenerationResult) -> None:
        """From now on this is a mere name of `successor`, which was handed out before."""
        assert self._answer.last is None
        assert not self._is_ended
        successor.client_id = self.client_id
        successor._abort = self._abort
        self._successor = successor

    def check(self) -> None:
        """Raises AssertionError where the parts do not agree."""
        with self._lock:
            self._answer.check()
            last = self._answer.last
            is_finished = last is not None and last.finish is not None
            assert self._is_ended == (is_finished or self._error is not None)
            assert not (is_finished and self._error is not None)
            assert not (self._is_ended and (self._waiters or self._end_waiters))
            assert not (self._home_waiter is not None and self._is_ended)

    def _take_waiters(self, *, is_end: bool) -> list[Waiter]:
        """Whom this wakes, but for the reader at home. Under the lock."""
        waiters, self._waiters = self._waiters, []
        if is_end:
            self._is_ended = True
            self._ended_s = time.monotonic()
            waiters += self._end_waiters
            self._end_waiters = []
        return waiters

    def _wake(self, waiters: list[Waiter]) -> None:
        home = self._home
        for waiter in waiters:
            if isinstance(waiter, queue.SimpleQueue):
                waiter.put(None)
            elif waiter.get_loop() is not home.loop:
                home.wake_elsewhere(waiter)
            elif not waiter.done():
                waiter.set_result(None)

    def _tell_end(self) -> None:
        if self.on_end is not None:
            self.on_end(self)

    def _overrun_by(self, num_unread: int) -> None:
        if self._overrun is not None or self._end_waiters:  # who awaits the whole reads it all
            return
        self._overrun = SlowConsumerError(
            f"max_unread_tokens is {self._unread_max}, and the consumer left {num_unread} tokens "
            "unread: its request was ended",
            field="max_unread_tokens",
            value=num_unread,
            limit=self._unread_max,
        )
        self._abort(self.client_id)

    # --- piece by piece -----------------------------------------------------------

    def __aiter__(self) -> GenerationResult:
        return self

    def __iter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> ResultChunk:
        while True:
            with self._lock:
                if self._answer.first_unread is not None:
                    return self._answer.take()
                if self._is_ended:
                    raise self._ending(StopAsyncIteration())
                waiter = self._new_reader()
            if waiter is not self._home_waiter:
                await self._await(waiter)
                continue
            try:  # not by `_await`: a coroutine less per token
                await waiter
            except BaseException:
                self._forget(waiter)
                raise

    def __next__(self) -> ResultChunk:
        self._refuse_at_home("`async for`")
        while True:
            with self._lock:
                if self._answer.first_unread is not None:
                    return self._answer.take()
                if self._is_ended:
                    raise self._ending(StopIteration())
                waiter = self._new_queue(self._waiters)
            self._block(waiter, None)

    def _ending(self, end: Exception) -> Exception:
        """The one error, without the frames that an earlier raise of it has left."""
        return end if self._error is None else self._error.with_traceback(None)

    # --- whole ----------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.aresult().__await__()

    async def aresult(self) -> Completion:
        """The whole answer. Raises the error that ended it, always the same object."""
        while True:
            with self._lock:
                if self._is_ended:
                    return self._whole()
                waiter = self._new_future(self._end_waiters)
            await self._await(waiter)

    def result(self, timeout_s: float | None = None) -> Completion:
        """As `aresult`, from a plain thread. Raises TimeoutError where it takes longer
        than `timeout_s`; the request then goes on."""
        self._refuse_at_home("`await`")
        deadline_s = _deadline_s(timeout_s)
        while True:
            with self._lock:
                if self._is_ended:
                    return self._whole()
                waiter = self._new_queue(self._end_waiters)
            self._block(waiter, deadline_s)

    def _whole(self) -> Completion:
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._completion is None:
            self._completion = self._make_completion()
        return self._completion

    def _make_completion(self) -> Completion:
        last = self._answer.last
        assert last is not None
        assert last.finish is not None
        timing = timing_of(
            started_s=self._started_s,
            first_token_s=self._first_token_s,
            last_token_s=self._ended_s,
            num_tokens=len(self._answer.token_ids),
            generation=last.finish.timing,
        )
        return self._answer.completion(self._request, timing)

    # --- waiting --------------------------------------------------------------------

    def _new_reader(self) -> asyncio.Future[None]:
        loop = self._home.loop
        is_free = self._home_waiter is None and self._home.is_here()
        if not is_free or loop is None or not loop.is_running():
            return self._new_future(self._waiters)
        waiter: asyncio.Future[None] = asyncio.Future(loop=loop)
        self._home_waiter = waiter
        return waiter

    def _new_future(self, waiters: list[Waiter]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(future)
        return future

    def _new_queue(self, waiters: list[Waiter]) -> queue.SimpleQueue[None]:
        waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        waiters.append(waiter)
        return waiter

    async def _await(self, waiter: asyncio.Future[None]) -> None:
        """On another loop than the home's: the home may end without a word to it."""
        try:
            if waiter.get_loop() is self._home.loop:
                return await waiter
            if not self._home.is_here():  # a loop that a logits processor runs
                self._refuse_at_home("a loop elsewhere")
            while not (await asyncio.wait((waiter,), timeout=LOOK_S))[0]:
                self._look(None)
        except BaseException:
            self._forget(waiter)
            raise

    def _block(self, waiter: queue.SimpleQueue[None], deadline_s: float | None) -> None:
        try:
            while True:
                wait_s = LOOK_S
                if deadline_s is not None:
                    wait_s = min(LOOK_S, max(0.0, deadline_s - time.monotonic()))
                try:
                    return waiter.get(timeout=wait_s)
                except queue.Empty:
                    self._look(deadline_s)
        except BaseException:
            self._forget(waiter)
            raise

    def _look(self, deadline_s: float | None) -> None:
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise TimeoutError("the answer is not whole yet; the request goes on")
        if not self._home.is_alive() and not self._is_ended:
            raise ServerUnavailableError(
                "the event loop that ran the executor has ended without ending this request"
            )

    def _forget(self, waiter: Waiter) -> None:
        with self._lock:
            if waiter is self._home_waiter:
                self._home_waiter = None
            for waiters in (self._waiters, self._end_waiters):
                if waiter in waiters:
                    waiters.remove(waiter)

    def _refuse_at_home(self, instead: str) -> None:
        if self._home.is_waiting_for_us():
            raise WrongThreadError(
                "this thread runs the executor's own event loop or its engine, so a blocking call "
                f"would wait for itself; use {instead}, or wait for it elsewhere"
            )


def _deadline_s(timeout_s: float | None) -> float | None:
    """No clock reaches one that is too far away: it is none. Raises InvalidRequestError."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or timeout_s != timeout_s:
        raise invalid("timeout_s", timeout_s, "a number of seconds, or None")
    return None if timeout_s > threading.TIMEOUT_MAX else time.monotonic() + timeout_s
