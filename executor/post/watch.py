"""Whether a postprocess worker still answers, and whether another restart is due. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class AnswerWatch:
    """Fed with times. It looks every `period_s`; where that did not happen it was we who
    stood still, with the answers unread: that time is not held against any worker."""

    answer_s_max: float
    period_s: float
    looked_at_s: float
    not_before_s: float = 0.0

    def look(self, now_s: float) -> None:
        if now_s - self.looked_at_s > 2 * self.period_s:
            self.not_before_s = now_s
        self.looked_at_s = now_s

    def is_overdue(self, waiting_since_s: float | None, now_s: float) -> bool:
        """`waiting_since_s`: since when one worker has an answer due; None: it has none."""
        if waiting_since_s is None:
            return False
        return now_s - max(waiting_since_s, self.not_before_s) > self.answer_s_max


class RestartBudget:
    """At most `restarts_max` restarts in any `window_s`."""

    def __init__(self, restarts_max: int, window_s: float) -> None:
        self._restarts_max = restarts_max
        self._window_s = window_s
        self._times_s: deque[float] = deque()

    def take(self, now_s: float) -> bool:
        """True where one more is allowed; it is counted."""
        while self._times_s and self._times_s[0] <= now_s - self._window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self._restarts_max:
            return False
        self._times_s.append(now_s)
        return True
