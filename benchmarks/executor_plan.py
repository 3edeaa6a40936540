"""How long the executor's benchmark measures, and how its windows take turns."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.executor_load import Figures, Span

Window = Callable[[], Awaitable[Figures]]


@dataclass(frozen=True)
class Plan:
    """`num_requests` are for the parts that measure requests, not streams."""

    num_rounds: int
    span: Span
    num_requests: int

    async def in_turn(self, *windows: Window) -> list[Figures]:
        """Each window's medians over the rounds; a noisy moment hits all of them alike."""
        rounds = [[await window() for window in windows] for _ in range(self.num_rounds)]
        return [_median_of(column) for column in zip(*rounds, strict=True)]


FULL = Plan(num_rounds=5, span=Span(warm_up_s=0.5, half_s=1.5), num_requests=512)
QUICK = Plan(num_rounds=1, span=Span(warm_up_s=0.2, half_s=0.25), num_requests=64)


def _median_of(windows: tuple[Figures, ...]) -> Figures:
    """Figure by figure."""
    names = Figures.__dataclass_fields__
    return Figures(**{n: statistics.median(getattr(w, n) for w in windows) for n in names})
