"""The worker's inbox: filled by the receiving thread, drained by the loop, bounded."""

from __future__ import annotations

import threading
from collections import deque

from executor.messages import Stop, ToWorker


class Inbox:
    """`put` waits where the inbox is full; `wake` and `stop` never do."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._messages: deque[ToWorker] = deque()
        self._condition = threading.Condition()
        self._is_woken = False
        self._is_stopped = False

    def put(self, messages: list[ToWorker]) -> None:
        with self._condition:
            while len(self._messages) >= self._messages_max and not self._is_stopped:
                self._condition.wait()
            self._messages.extend(messages)
            self._condition.notify_all()

    def wake(self) -> None:
        """Make a waiting `take` return. From any thread."""
        with self._condition:
            self._is_woken = True
            self._condition.notify_all()

    def stop(self) -> None:
        """As if a Stop had come after what is there. From any thread."""
        with self._condition:
            self._is_stopped = True
            self._messages.append(Stop())
            self._condition.notify_all()

    def take(self, timeout_s: float | None) -> list[ToWorker]:
        """All there is; waits for news at most `timeout_s` (None: without end)."""
        with self._condition:
            if not self._messages and not self._is_woken and timeout_s != 0:
                self._condition.wait_for(lambda: self._messages or self._is_woken, timeout_s)
            self._is_woken = False
            messages = list(self._messages)
            self._messages.clear()
            self._condition.notify_all()
            return messages
