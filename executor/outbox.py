"""The worker's voice: one authenticated result socket, used by two threads under a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

from executor.ipc import FrameSender
from executor.messages import Heartbeat, ToProxy

SEND_SLICE_S = 1.0


class Outbox:
    """`say` waits while the proxy does not read, but not for a proxy that is gone."""

    def __init__(self, sender: FrameSender, is_stopping: Callable[[], bool]) -> None:
        self._sender = sender
        self._is_stopping = is_stopping
        self._lock = threading.Lock()

    def say(self, message: ToProxy) -> bool:
        """False where we were told to stop before the proxy had room for it."""
        while True:
            with self._lock:
                if self._sender.send(message, timeout_s=SEND_SLICE_S):
                    return True
            if self._is_stopping():
                return False

    def beat(self, heartbeat: Heartbeat) -> None:
        """Left out where the proxy does not read: the next one tells more."""
        if self._lock.acquire(timeout=SEND_SLICE_S):
            try:
                self._sender.send(heartbeat)
            finally:
                self._lock.release()
