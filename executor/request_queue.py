"""The frontend's end of the one ordered queue to the worker.

Requests and control may be refused when the worker does not keep up; cancels
may not, so they wait here, in order, and nothing overtakes them. The backlog is
bounded by the number of live requests: each sends one cancel at most.

A message is packed when it is offered: what cannot be sent is refused then, and
never waits here. Sends may be batched: several messages in one frame, once
`batch_max` or BATCH_BYTES_MAX of them wait, or `batch_s` after the first. That saves a
frame's cost per message and delays every one of them, the end sentinel's sender
included; it is off by default.

Life: open, `close`d (nothing is taken or sent any more). `flush`, `put` and `close`
never raise. A `put` from within a send (a generator that the garbage collector closes
there gives its request up) waits for its end, since frames are numbered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from executor.messages import Batch, ToWorker, WorkerFrame
from protos.errors import InvalidRequestError

logger = logging.getLogger(__name__)
BATCH_BYTES_MAX: Final = 4 << 20
"""A frame of several messages has no more; one of a single message may."""


class Sender(Protocol):
    """A bounded way to the worker: a socket's, or an inbox's in this process."""

    def send(self, message: WorkerFrame) -> bool:
        """False where it is full; nothing was sent then."""

    def has_room(self) -> bool:
        """Whether the worker is there and its queue not full."""

    def close(self) -> None: ...


class _Packed(NamedTuple):
    content: Any
    """The message, or what stands for it in a frame."""
    num_bytes: int


class RequestQueue:
    def __init__(
        self,
        sender: Sender,
        *,
        batch_max: int = 1,
        batch_s: float = 0.0,
        loop: asyncio.AbstractEventLoop | None = None,
        packer: Callable[[ToWorker], msgspec.Raw] | None = None,
        batch_bytes_max: int = BATCH_BYTES_MAX,
    ) -> None:
        """`loop` is needed where `batch_max` is over 1. Without a `packer` messages stay the
        objects they are."""
        self._batch_bytes_max = batch_bytes_max
        self._sender = sender
        self._batch_max = batch_max
        self._batch_s = batch_s
        self._loop = loop
        self._packer = packer
        self._timer: asyncio.TimerHandle | None = None
        self._backlog: deque[_Packed] = deque()
        self._backlog_bytes = 0
        self._is_stuck = False
        self._is_sending = False
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._backlog)

    def is_connected(self) -> bool:
        return self._sender.has_room()

    @property
    def is_stuck(self) -> bool:
        """Whether something was to be sent and had no room, and there has been none since."""
        if self._is_stuck and not self._backlog:
            self._is_stuck = not self._sender.has_room()
        return self._is_stuck and not self._is_closed

    def offer(self, message: ToWorker) -> bool:
        """Send it now, or with the batch that is being gathered, or not at all.

        Raises InvalidRequestError for what cannot be sent at all.
        """
        packed = self._pack(message)
        if self._is_closed:
            return False
        if self._batch_max == 1:
            return self.flush() and self._send_alone(packed.content)
        if self._is_batch_full and not self.flush():
            return False
        if not self._backlog and not self._sender.has_room():
            self._is_stuck = True
            return False
        self._gather(packed)
        return True

    def put(self, message: ToWorker) -> None:
        """Send it now, or with its batch, or as soon as there is room."""
        if self._is_closed:
            return
        try:
            packed = self._pack(message)
        except InvalidRequestError:
            logger.exception("a %s of our own cannot be sent", type(message).__name__)
            return
        if self._batch_max == 1:
            self._append(packed)
            self.flush()
        else:
            self._gather(packed)

    def flush(self) -> bool:
        """True where nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_sending:
            return False  # within a send: that one sees to the rest
        while self._backlog and not self._is_closed:
            frame = self._next_frame()
            content = frame[0] if len(frame) == 1 else Batch(tuple(frame))
            if not self._send(content):
                return False
            for _ in frame:
                self._backlog_bytes -= self._backlog.popleft().num_bytes
        return not self._backlog

    def close(self) -> None:
        """Safe twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_closed = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._sender.close()

    def check(self) -> None:
        """Raises AssertionError where the books do not balance."""
        assert self._backlog_bytes == sum(packed.num_bytes for packed in self._backlog)

    @property
    def _is_batch_full(self) -> bool:
        is_large = self._backlog_bytes >= self._batch_bytes_max
        return is_large or len(self._backlog) >= self._batch_max

    def _pack(self, message: ToWorker) -> _Packed:
        if self._packer is None:
            return _Packed(message, 0)
        raw = self._packer(message)
        return _Packed(raw, len(memoryview(raw)))

    def _append(self, packed: _Packed) -> None:
        self._backlog.append(packed)
        self._backlog_bytes += packed.num_bytes

    def _gather(self, packed: _Packed) -> None:
        self._append(packed)
        if self._is_batch_full:
            self.flush()
        elif self._timer is None:
            assert self._loop is not None
            self._timer = self._loop.call_later(self._batch_s, self.flush)

    def _next_frame(self) -> list[Any]:
        """At least one message, and no more than fit into a frame."""
        frame: list[Any] = []
        num_bytes = 0
        for packed in self._backlog:
            num_bytes += packed.num_bytes
            if frame and (num_bytes > self._batch_bytes_max or len(frame) >= self._batch_max):
                break
            frame.append(packed.content)
        return frame

    def _send_alone(self, content: Any) -> bool:
        is_sent = self._send(content)
        if is_sent and self._backlog:
            self.flush()
        return is_sent

    def _send(self, content: Any) -> bool:
        """The garbage collector may run what it likes in here, a `put` of ours too: that waits."""
        self._is_sending = True
        try:
            is_sent = self._sender.send(content)
        finally:
            self._is_sending = False
        self._is_stuck = not is_sent
        return is_sent
