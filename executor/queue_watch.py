"""Whether the worker reads its queue: one that beats may do so and still be cut off from it.

read ──something to send has no room for silence_s──> unread ──room──> read
    (for half of give_up_s where the loop works: a long step reads nothing, and is no fault)
unread ──give_up_s──> given up (for good)
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.health import HealthBounds

PERIODS_MAX = 2
"""What lies between two looks beyond that was our own standstill."""


@dataclass(slots=True)
class QueueWatch:
    """Pure: told at every tick, at least each `period_s`, how the queue stands."""

    bounds: HealthBounds
    period_s: float
    looked_at_s: float
    stuck_s: float = 0.0
    is_busy: bool = False
    """Whether the worker's loop said that it works: it may then read late."""

    def on_tick(self, now_s: float, *, is_stuck: bool) -> None:
        passed_s = min(now_s - self.looked_at_s, PERIODS_MAX * self.period_s)
        self.looked_at_s = now_s
        self.stuck_s = self.stuck_s + passed_s if is_stuck else 0.0

    def look(self) -> str:
        """What is wrong with "the worker" that the caller names; empty while all is well."""
        bounds = self.bounds
        busy_s = max(bounds.silence_s, bounds.give_up_s / 2)
        bound_s, name = bounds.silence_s, "health.silence_ms"
        if self.is_busy:
            bound_s, name = busy_s, "half of health.give_up_ms"
        if self.stuck_s <= bound_s:
            return ""
        return (
            f"has not read its queue for {self.stuck_s:.1f} s (limit {bound_s:g} s, {name}): "
            "the queue is full, or its connection is cut"
        )

    @property
    def is_given_up(self) -> bool:
        return self.stuck_s > self.bounds.give_up_s
