"""The frontend's end of the one ordered queue to the worker.

Requests and control may be refused when the worker does not keep up; cancels
may not, so they wait here, in order, and nothing overtakes them. The backlog is
bounded by the number of live requests: each sends one cancel at most.

Sends may be batched: several messages in one frame, once `batch_max` wait or
`batch_s` after the first of them. That saves a frame's cost per message and
delays every one of them, the end sentinel's sender included; it is off by default.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import Protocol

from executor.messages import Batch, ToWorker, WorkerFrame


class Sender(Protocol):
    """A bounded way to the worker: a socket's, or an inbox's in this process."""

    def send(self, message: WorkerFrame) -> bool:
        """False where it is full; nothing was sent then."""

    def has_room(self) -> bool:
        """Whether the worker is there and its queue not full."""

    def close(self) -> None: ...


class RequestQueue:
    def __init__(
        self,
        sender: Sender,
        *,
        batch_max: int = 1,
        batch_s: float = 0.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop` is needed where `batch_max` is over 1."""
        self._sender = sender
        self._batch_max = batch_max
        self._batch_s = batch_s
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._backlog: deque[ToWorker] = deque()

    def __len__(self) -> int:
        return len(self._backlog)

    def is_connected(self) -> bool:
        return self._sender.has_room()

    def offer(self, message: ToWorker) -> bool:
        """Send it now, or with the batch that is being gathered, or not at all."""
        if self._batch_max == 1:
            return self.flush() and self._sender.send(message)
        if len(self._backlog) >= self._batch_max and not self.flush():
            return False
        if not self._backlog and not self._sender.has_room():
            return False
        self._gather(message)
        return True

    def put(self, message: ToWorker) -> None:
        """Send it now, or with its batch, or as soon as there is room."""
        if self._batch_max == 1:
            self._backlog.append(message)
            self.flush()
        else:
            self._gather(message)

    def flush(self) -> bool:
        """True where nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._backlog:
            frame = self._next_frame()
            if not self._sender.send(frame):
                return False
            for _ in range(len(frame.messages) if isinstance(frame, Batch) else 1):
                self._backlog.popleft()
        return True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._backlog.clear()
        self._sender.close()

    def _gather(self, message: ToWorker) -> None:
        self._backlog.append(message)
        if len(self._backlog) >= self._batch_max:
            self.flush()
        elif self._timer is None:
            assert self._loop is not None
            self._timer = self._loop.call_later(self._batch_s, self.flush)

    def _next_frame(self) -> WorkerFrame:
        if self._batch_max == 1 or len(self._backlog) == 1:
            return self._backlog[0]
        return Batch(tuple(islice(self._backlog, self._batch_max)))
