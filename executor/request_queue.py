"""The proxy's end of the one ordered queue to the worker.

Requests and control may be refused when the worker does not keep up; cancels
may not, so they wait here, in order, and nothing overtakes them. The backlog is
bounded by the number of live requests: each sends one cancel at most.
"""

from __future__ import annotations

from collections import deque

from executor.ipc import FrameSender
from executor.messages import ToWorker


class RequestQueue:
    def __init__(self, sender: FrameSender) -> None:
        self._sender = sender
        self._backlog: deque[ToWorker] = deque()

    def __len__(self) -> int:
        return len(self._backlog)

    def is_connected(self) -> bool:
        return self._sender.has_room()

    def offer(self, message: ToWorker) -> bool:
        """Send it now or not at all."""
        return self.flush() and self._sender.send(message)

    def put(self, message: ToWorker) -> None:
        """Send it now or as soon as there is room."""
        self._backlog.append(message)
        self.flush()

    def flush(self) -> bool:
        """True where nothing waits any more."""
        while self._backlog:
            if not self._sender.send(self._backlog[0]):
                return False
            self._backlog.popleft()
        return True

    def close(self) -> None:
        self._backlog.clear()
        self._sender.socket.close(linger=0)
