"""Whether the worker's loop advances: a healthy answer means progress, not only a pid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProgressWatch:
    """Pure: fed with heartbeats and times, asked for the trouble."""

    stall_s: float
    heard_at_s: float
    advanced_at_s: float
    progress: int = -1

    @classmethod
    def start(cls, stall_s: float, now_s: float) -> ProgressWatch:
        return cls(stall_s, now_s, now_s)

    def on_heartbeat(self, now_s: float, progress: int, is_busy: bool) -> None:
        self.heard_at_s = now_s
        if progress != self.progress or not is_busy:
            self.advanced_at_s = now_s
        self.progress = progress

    def trouble(self, now_s: float) -> str:
        """Empty while all is well."""
        if now_s - self.heard_at_s > self.stall_s:
            return (
                f"the engine's worker has said nothing for {now_s - self.heard_at_s:.1f} s "
                f"(limit {self.stall_s:g} s): it is stopped or starved"
            )
        if now_s - self.advanced_at_s > self.stall_s:
            return (
                f"the engine's loop has not advanced for {now_s - self.advanced_at_s:.1f} s "
                f"under work (limit {self.stall_s:g} s)"
            )
        return ""
