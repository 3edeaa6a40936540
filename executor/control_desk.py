"""Rank 0's desk for control calls: in order with the requests, answered once by all ranks.

A call comes by the ordered queue, is begun on the engine's loop between two
steps, and is answered there where its value is at hand, else by one control
thread, which waits for what takes long: a trace being written, the members. So
the loop never waits; answers bear their call's number.

Room at the members is looked for first, then comes the leader's own verdict: where
it refuses, no member is asked, and where it acts, all are.

A call that fails ends alone, whatever it raised; the engine ends with it only where
the error says so itself (severity ENGINE). Where a member refused what the leader did,
every rank takes it back (`Method.undo`), on the loop again, before the caller hears of it.

Life: the thread starts with the first call and ends by `close`; calls that are
still waiting then are not answered, since the world ends with them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from executor.engine.control import Deferred, call_method
from executor.engine.control_seam import EngineControl
from executor.messages import Call, CallReply
from protos.errors import (
    BatonError,
    ErrorData,
    NotNowError,
    OverloadedError,
    RequestFailedError,
    Severity,
    describe,
)

logger = logging.getLogger(__name__)
CALLS_MAX = 64
MEMBERS_S_MAX = 600.0
CLOSE_S_MAX = 2.0


class RankAnswer(Protocol):
    """What one member says of a call."""

    @property
    def rank(self) -> int: ...

    @property
    def value(self) -> Any: ...

    @property
    def error(self) -> ErrorData | None: ...


class Members(Protocol):
    """The other ranks, as the leader reaches them."""

    @property
    def has_room(self) -> bool:
        """Whether the next call will be sent to all of them."""

    def call_all(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Future[tuple[RankAnswer, ...]]:
        """Never waits; the answers are in order of rank."""


@dataclass(frozen=True)
class _Begun:
    frontend_id: int
    call_id: int
    method: str
    own: Any
    others: Future[tuple[RankAnswer, ...]] | None
    arguments: Mapping[str, Any]


class ControlDesk:
    """`begin` and `turn` are the loop's; `say` is called on the control thread or the loop's,
    `wake` on the control thread: the loop shall take its turn. `in_words` gives requests that are
    named in a refusal their callers' names."""

    def __init__(
        self,
        control: EngineControl,
        say: Callable[[int, CallReply], object],
        members: Members | None = None,
        *,
        wake: Callable[[], None] = lambda: None,
        in_words: Callable[[str], str] = str,
    ) -> None:
        self._control = control
        self._say = say
        self._wake = wake
        self._in_words = in_words
        self._failed: deque[tuple[_Begun, CallReply]] = deque()
        """Calls that a member refused: to be taken back, then answered."""
        self._members = members
        self._begun: queue.Queue[_Begun | None] = queue.Queue(CALLS_MAX)
        self._thread: threading.Thread | None = None
        self._began_at_s: float | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether the loop is within a call, which may take longer than a step; one that takes
        longer than any may counts as a step that hangs."""
        began_at_s = self._began_at_s
        return began_at_s is not None and time.monotonic() - began_at_s < MEMBERS_S_MAX

    def begin(self, frontend_id: int, call: Call) -> None:
        """Raises what is of severity ENGINE; every other error is the call's answer."""
        self._began_at_s = time.monotonic()
        try:
            self._check_room()
            arguments = _decoded(call)
            own = call_method(self._control.methods(), call.method, arguments)
        except Exception as error:
            failure = _as_failure(call.method, error)
            if failure.severity is not Severity.REQUEST:
                raise
            self._say(frontend_id, CallReply(call.call_id, (), self._readable(failure)))
            return
        finally:
            self._began_at_s = None
        others = None
        if self._members is not None:
            others = self._members.call_all(call.method, arguments, MEMBERS_S_MAX)
        if others is None and not isinstance(own, Deferred):
            self._answer(_Begun(frontend_id, call.call_id, call.method, own, None, arguments))
            return
        self._begun.put(_Begun(frontend_id, call.call_id, call.method, own, others, arguments))
        self._start()

    def _readable(self, failure: BatonError) -> ErrorData:
        """An engine knows requests by numbers that nobody else does."""
        data = failure.to_data()
        if not isinstance(failure, NotNowError):
            return data
        return msgspec.structs.replace(
            data, message=self._in_words(data.message), value=self._in_words(data.value)
        )

    def turn(self) -> None:
        """Asked by the loop in every round. Raises as `begin`."""
        while self._failed and (self._members is None or self._members.has_room):
            begun, reply = self._failed.popleft()
            self._take_back(begun)
            self._say(begun.frontend_id, reply)

    def _take_back(self, begun: _Begun) -> None:
        """On every rank, in order with the calls that follow; where there is nothing to take
        back, the rank says so and nobody minds."""
        methods = self._control.methods()
        undo = methods[methods[begun.method].undo]
        arguments = {name: begun.arguments[name] for name in undo.parameters}
        try:
            call_method(methods, undo.name, arguments)
        except Exception as error:
            failure = _as_failure(undo.name, error)
            if failure.severity is not Severity.REQUEST:
                raise
            logger.info("%s after a failed %s: %s", undo.name, begun.method, failure)
        if self._members is not None:
            self._members.call_all(undo.name, arguments, MEMBERS_S_MAX)

    def _check_room(self) -> None:
        """Before anything is done: what rank 0 did alone, the members would not know of."""
        has_room = self._members is None or self._members.has_room
        if self._begun.full() or not has_room:
            raise OverloadedError(f"{CALLS_MAX} control calls wait already", limit=CALLS_MAX)

    def close(self) -> None:
        """Leaves a thread that is writing a file to end with the process."""
        if self._thread is None:
            return
        try:
            self._begun.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S_MAX)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="control", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            self._answer(begun)

    def _answer(self, begun: _Begun) -> None:
        try:
            own = begun.own.finish() if isinstance(begun.own, Deferred) else begun.own
            values = (own, *_values_of(begun))
            reply = CallReply(begun.call_id, tuple(map(msgspec.msgpack.encode, values)), None)
        except Exception as error:
            reply = CallReply(begun.call_id, (), _as_failure(begun.method, error).to_data())
        if reply.error is not None and self._control.methods()[begun.method].undo:
            self._failed.append((begun, reply))
        else:
            self._say(begun.frontend_id, reply)
        if self._failed:  # also those for which the members had no room before
            self._wake()


def _decoded(call: Call) -> dict[str, Any]:
    try:
        return msgspec.msgpack.decode(call.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestFailedError(f"{call.method}: its arguments cannot be read: {error}") from None


def _values_of(begun: _Begun) -> list[Any]:
    """Raises RequestFailedError naming the first rank that failed."""
    if begun.others is None:
        return []
    values: list[Any] = []
    for answer in begun.others.result():
        if answer.error is not None:
            message = f"{begun.method} failed on rank {answer.rank}: {answer.error.message}"
            limit = answer.error.limit
            raise RequestFailedError(message, field="rank", value=answer.rank, limit=limit)
        values.append(answer.value)
    return values


def _as_failure(method: str, error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    logger.exception("the control call %s failed", method)
    return RequestFailedError(f"{method} failed: {describe(error)}")
