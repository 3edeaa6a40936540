"""A world's table driven by a test: events in, effects out, its check after each."""

from __future__ import annotations

from typing import Any

from executor.world.events import Effect, Event, Helloed, Readied
from executor.world.table import WorldBounds, WorldTable

BOUNDS = WorldBounds(
    hello_s_max=60.0,
    load_s_max=100.0,
    last_words_s=0.1,
    silence_s=3.0,
    give_up_s=30.0,
    period_s=1.0,
    stop_live_s_max=180.0,
    stop_dead_s_max=5.0,
)


class Driven:
    def __init__(self, num_ranks: int = 1, **more: Any) -> None:
        self.table = WorldTable(num_ranks, BOUNDS, **more)
        self.now_s = 0.0

    def is_in(self, phase: str) -> bool:
        return self.table.phase == phase

    def give(self, event: Event, at_s: float | None = None) -> list[Effect]:
        self.now_s = self.now_s if at_s is None else at_s
        effects = self.table.handle(event, self.now_s)
        self.table.check()
        return effects

    def hello(self, *ranks: int, is_seen: bool = True) -> list[Effect]:
        said = [self.give(Helloed(rank, f"rank {rank}", is_seen)) for rank in ranks]
        return [effect for effects in said for effect in effects]

    def serving(self, *, is_seen: bool = True) -> Driven:
        ranks = range(self.table.num_ranks)
        self.hello(*ranks, is_seen=is_seen)
        for rank in ranks:
            self.give(Readied(rank))
        assert self.is_in("serving")
        return self
