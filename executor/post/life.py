"""Which life a bucket leads. Pure: events in, what to do out.

    STARTING ──ready──> SERVING
        │                  │
        └────── death ─────┤
                           ├── a restart is allowed ──> STARTING (a new incarnation)
                           └── too many deaths ───────> IN_PROCESS (for good)
    any ── stop ──> STOPPED

In STARTING its requests' outputs wait in the window, bounded; in IN_PROCESS the
frontend makes the text itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from executor.post.watch import RestartBudget


class BucketState(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    IN_PROCESS = "in_process"
    STOPPED = "stopped"


class Next(enum.StrEnum):
    """What the shell does after a death."""

    NOTHING = "nothing"
    RESTART = "restart"
    IN_PROCESS = "in_process"


@dataclass(slots=True)
class BucketLife:
    budget: RestartBudget
    state: BucketState = BucketState.STARTING
    incarnation: int = 1
    num_deaths: int = 0
    last_cause: str = ""

    def on_ready(self) -> bool:
        """False where nobody was waited for."""
        if self.state is not BucketState.STARTING:
            return False
        self.state = BucketState.SERVING
        return True

    def on_death(self, cause: str, now_s: float) -> Next:
        """Of the present incarnation's worker."""
        if self.state in (BucketState.IN_PROCESS, BucketState.STOPPED):
            return Next.NOTHING
        self.num_deaths += 1
        self.last_cause = cause
        self.incarnation += 1
        if self.budget.take(now_s):
            self.state = BucketState.STARTING
            return Next.RESTART
        self.state = BucketState.IN_PROCESS
        return Next.IN_PROCESS

    def stop(self) -> None:
        self.state = BucketState.STOPPED
