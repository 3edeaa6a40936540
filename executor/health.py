"""Whether the worker is there and its loop advances: a healthy answer means progress.

well ──nothing heard for silence_s──> silent ──heard again──> well
well ──beats, but no round under work for stall_s──> stalled ──a round, or a step's answers──> well
silent or stalled ──give_up_s since the last sign──> given up (for good)
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.config import HealthConfig


@dataclass(frozen=True, slots=True)
class HealthBounds:
    silence_s: float = 3.0
    stall_s: float = 4.0
    give_up_s: float = 30.0

    @classmethod
    def of(cls, config: HealthConfig) -> HealthBounds:
        return cls(config.silence_ms / 1000, config.stall_ms / 1000, config.give_up_ms / 1000)


@dataclass(slots=True)
class ProgressWatch:
    """Pure: fed with what comes from the worker and with times, asked for the trouble.

    It is asked every `period_s` at least. What lies over that between two looks was
    our own standstill (stopped, swapped out, one long callback), and what the worker
    said meanwhile is still to be read: none of it is held against it, however short,
    since several short ones in a row would add up to a silence.
    """

    bounds: HealthBounds
    period_s: float
    heard_at_s: float
    advanced_at_s: float
    looked_at_s: float
    progress: int = -1

    @classmethod
    def start(cls, bounds: HealthBounds, period_s: float, now_s: float) -> ProgressWatch:
        return cls(bounds, period_s, now_s, now_s, now_s)

    def on_heard(self, now_s: float) -> None:
        """Any message shows that the worker runs. While it was stopped its loop was too."""
        silent_s = now_s - self.heard_at_s
        if silent_s > self.bounds.silence_s:
            self.advanced_at_s = min(now_s, self.advanced_at_s + silent_s)
        self.heard_at_s = now_s

    def on_heartbeat(self, now_s: float, progress: int, is_busy: bool) -> None:
        self.on_heard(now_s)
        if progress != self.progress or not is_busy:
            self.advanced_at_s = now_s
        self.progress = progress

    def on_outputs(self) -> None:
        """What was just heard is a step's answers. Where we read slower than the engine makes
        them there is no room for a heartbeat, and they alone show that its loop goes on."""
        self.advanced_at_s = self.heard_at_s

    def look(self, now_s: float) -> str:
        """What is wrong with "the worker" that the caller names; empty while all is well."""
        self._forgive_own_sleep(now_s)
        bounds = self.bounds
        silent_s = now_s - self.heard_at_s
        if silent_s > bounds.silence_s:
            return (
                f"has said nothing for {silent_s:.1f} s (limit {bounds.silence_s:g} s, "
                "health.silence_ms): it is stopped or starved"
            )
        standing_s = now_s - self.advanced_at_s
        if standing_s > bounds.stall_s:
            return (
                f"has not advanced for {standing_s:.1f} s under work (limit {bounds.stall_s:g} s, "
                "health.stall_ms)"
            )
        return ""

    def is_given_up(self, now_s: float) -> bool:
        """Asked while there is trouble."""
        return now_s - min(self.heard_at_s, self.advanced_at_s) > self.bounds.give_up_s

    def _forgive_own_sleep(self, now_s: float) -> None:
        slept_s = max(0.0, now_s - self.looked_at_s - self.period_s)
        self.looked_at_s = now_s
        self.heard_at_s = min(now_s, self.heard_at_s + slept_s)
        self.advanced_at_s = min(now_s, self.advanced_at_s + slept_s)
