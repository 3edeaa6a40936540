"""Requests that wait until the engine has room for them, in order.

    waiting ── room ──> open ── the executor's end ──> ended
       ├── the executor takes nobody for the moment ──> waiting
       ├── abort, close ──> ended
       └── the executor refuses it ──> ended

An offline program hands over thousands of prompts at once; an executor refuses
what its queue cannot hold. Between them stands this line, on the executor's
loop. A request's deadline starts when it leaves the line.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable

from executor.home import Home
from executor.request import ExecutorRequest
from executor.result import GenerationResult
from protos.errors import BatonError, InternalError, RequestCancelledError, Severity, describe

logger = logging.getLogger(__name__)
RETRY_S = 0.1
"""How soon an executor that takes nobody is asked again. It recovers or is declared dead."""


class Opened(enum.Enum):
    YES = enum.auto()
    NO = enum.auto()
    """It has ended: the executor refused it."""
    NOT_YET = enum.auto()
    """The executor takes nobody now: its queue is full, or its engine stands still."""


class Entry:
    """A request and the result that was handed out for it. `owner` lives as long as it does."""

    __slots__ = ("_inner", "_line", "_notify", "_owner", "request", "result")

    def __init__(
        self,
        request: ExecutorRequest,
        home: Home,
        *,
        owner: object,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self._owner: object = owner
        self._notify = notify
        self._inner: GenerationResult | None = None
        self._line: Line | None = None
        self.result = GenerationResult(
            0,
            self._abort,
            home=home,
            request=request,
            max_unread_tokens=request.max_unread_tokens,
        )
        self.result.on_end = self._on_end

    def stand_in(self, line: Line) -> None:
        self._line = line

    def open(self, submit: Callable[[ExecutorRequest], GenerationResult]) -> Opened:
        """A refusal that passes is none of the request's: it goes on waiting."""
        try:
            self._inner = submit(self.request)
        except BatonError as error:
            if error.is_retryable and error.severity is Severity.REQUEST:
                return Opened.NOT_YET
            self.result.fail(error)
        except Exception as error:
            logger.exception("submitting %r failed", self.request.external_id)
            self.result.fail(InternalError(f"submitting failed: {describe(error)}"))
        else:
            self._inner.pass_on_to(self.result)
            return Opened.YES
        return Opened.NO

    def _abort(self, _: int) -> None:
        if self._inner is not None:
            self._inner.abort()
        elif not self.result.is_ended:
            self.result.fail(RequestCancelledError("the request was cancelled before it started"))

    def _on_end(self, _: GenerationResult) -> None:
        self._owner = None
        if self._notify is not None:
            self._notify()
        if self._line is not None:
            self._line.on_end(was_open=self._inner is not None)


class Line:
    """Everything here runs on the executor's loop."""

    def __init__(self, submit: Callable[[ExecutorRequest], GenerationResult], *, room: int) -> None:
        self._submit = submit
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Entry] = deque()
        self._num_open = 0
        self._is_pumping = False
        self._closed: BatonError | None = None

    def add(self, entry: Entry) -> None:
        if self._closed is not None:
            entry.result.fail(self._closed)
            return
        entry.stand_in(self)
        self._waiting.append(entry)
        self._pump_soon()

    def on_end(self, *, was_open: bool) -> None:
        if was_open:
            self._num_open -= 1
        self._pump_soon()

    def close(self, error: BatonError) -> None:
        """Nothing leaves the line any more; what the executor has, it ends itself."""
        self._closed = error
        while self._waiting:
            entry = self._waiting.popleft()
            if not entry.result.is_ended:
                entry.result.fail(error)

    def check(self) -> None:
        assert 0 <= self._num_open <= self._room
        assert self._closed is None or not self._waiting

    def _pump_soon(self) -> None:
        """In a turn of its own: an end is told from within the executor's own books."""
        if self._waiting and not self._is_pumping:
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pumping = False
        while self._waiting and self._num_open < self._room:
            entry = self._waiting.popleft()
            opened = Opened.NO if entry.result.is_ended else entry.open(self._submit)
            if opened is Opened.NOT_YET:
                self._waiting.appendleft(entry)
                self._is_pumping = True
                self._loop.call_later(RETRY_S, self._pump)
                return
            if opened is Opened.YES:
                self._num_open += 1
