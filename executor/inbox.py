"""The worker's inbox: filled by the receiving thread, or in the single-process form by the
frontend itself; drained by the loop; bounded."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple, TypeAlias

from executor.lane import OWNER_ID
from executor.messages import Stop, ToWorker


class LaneEnded(NamedTuple):
    """A lane is gone: what it asked for is not wanted any more."""

    why: str


Letter: TypeAlias = tuple[int, ToWorker | LaneEnded]
"""The lane's frontend id, and what came by it."""


class Inbox:
    """`put` waits where the inbox is full, `offer` says so; the others always have room."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._letters: deque[Letter] = deque()
        self._condition = threading.Condition()
        self._is_woken = False
        self._is_stopped = False

    def put(self, letters: list[Letter]) -> None:
        with self._condition:
            while len(self._letters) >= self._messages_max and not self._is_stopped:
                self._condition.wait()
            self._letters.extend(letters)
            self._condition.notify_all()

    def offer(self, letters: list[Letter]) -> bool:
        """False where it is full; never waits."""
        with self._condition:
            if len(self._letters) >= self._messages_max:
                return False
            self._letters.extend(letters)
            self._condition.notify_all()
            return True

    def has_room(self) -> bool:
        return len(self._letters) < self._messages_max

    def tell(self, frontend_id: int, news: LaneEnded) -> None:
        """Behind what has come by that lane. From any thread; there is one per lane."""
        with self._condition:
            self._letters.append((frontend_id, news))
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
            self._letters.append((OWNER_ID, Stop()))
            self._condition.notify_all()

    def take(self, timeout_s: float | None) -> list[Letter]:
        """All there is; waits for news at most `timeout_s` (None: without end)."""
        with self._condition:
            if not self._letters and not self._is_woken and timeout_s != 0:
                self._condition.wait_for(lambda: self._letters or self._is_woken, timeout_s)
            self._is_woken = False
            letters = list(self._letters)
            self._letters.clear()
            self._condition.notify_all()
            return letters
