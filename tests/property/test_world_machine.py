"""Whatever comes in whatever order: one declared cause, killed before it, and an end in time."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from executor.world.events import (
    LAUNCHER,
    Declare,
    Died,
    Done,
    Effect,
    End,
    Event,
    GiveUp,
    Gone,
    Heard,
    Helloed,
    KillAll,
    Readied,
    Serve,
    StopAsked,
    TellLeave,
    TellStop,
    Tick,
    Welcome,
)
from executor.world.table import Phase, WorldTable
from tests.support.world_table import BOUNDS

RANKS = st.integers(0, 3)
"""One of them does not exist in the largest world."""


class WorldMachine(RuleBasedStateMachine):
    """The model: what the world was told, kept without any of the table's own code."""

    @initialize(num_ranks=st.integers(1, 3), has_launcher=st.booleans(), strangers=st.booleans())
    def begin(self, num_ranks: int, has_launcher: bool, strangers: bool) -> None:
        self.num_ranks = num_ranks
        self.table = WorldTable(
            num_ranks, BOUNDS, has_launcher=has_launcher, sees_strangers=strangers
        )
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.helloed: set[int] = set()
        self.readied: set[int] = set()
        self.over: set[int] = set()
        self.stop_asked_at_s: float | None = None
        self.first_death_s: float | None = None

    def give(self, event: Event) -> list[Effect]:
        effects = self.table.handle(event, self.now_s)
        self.effects += effects
        return effects

    def is_up(self) -> bool:
        return Serve() in self.effects

    @precondition(lambda self: self.table.phase is Phase.STARTING)
    @rule(is_seen=st.booleans())
    def come_up(self, is_seen: bool) -> None:
        """As a world does where nothing goes wrong; the other rules rarely get there."""
        for rank in reversed(range(self.num_ranks)):
            self.hello(rank, is_seen)
        for rank in range(self.num_ranks):
            self.ready(rank)

    @rule(rank=RANKS, is_seen=st.booleans())
    def hello(self, rank: int, is_seen: bool) -> None:
        before = self.table.phase
        self.give(Helloed(rank, f"rank {rank}", is_seen))
        if 0 <= rank < self.num_ranks and before in (Phase.STARTING, Phase.LOADING):
            self.helloed.add(rank)

    @rule(rank=RANKS)
    def ready(self, rank: int) -> None:
        before = self.table.phase
        self.give(Readied(rank))
        if rank in self.helloed and before in (Phase.STARTING, Phase.LOADING):
            self.readied.add(rank)

    @rule(rank=RANKS)
    def heard(self, rank: int) -> None:
        self.give(Heard(rank))

    @rule(rank=st.integers(0, 2))
    def died(self, rank: int) -> None:
        self.give(Died(rank, "words"))

    @rule(rank=st.one_of(RANKS, st.just(LAUNCHER)))
    def gone(self, rank: int) -> None:
        before = self.table.phase
        self.over.add(rank)
        self.give(Gone(rank, f"{rank} is gone"))
        if self.table.phase is Phase.SUSPECT and before is not Phase.SUSPECT:
            self.first_death_s = self.now_s

    @rule()
    def give_up(self) -> None:
        self.give(GiveUp("given up"))

    @rule(rank=RANKS)
    def done(self, rank: int) -> None:
        self.over.add(rank)
        self.give(Done(rank))

    @rule()
    def all_heard(self) -> None:
        for rank in range(self.num_ranks):
            self.heard(rank)

    @rule(is_well=st.booleans())
    def stop(self, is_well: bool) -> None:
        self.give(StopAsked(is_well))
        if self.stop_asked_at_s is None:
            self.stop_asked_at_s = self.now_s

    @rule(wait_s=st.sampled_from((0.01, 0.1, 1.0, 5.0, 60.0)))
    def wait(self, wait_s: float) -> None:
        """As the shell does: a tick every period, and one at the table's own deadline."""
        ends_at_s = self.now_s + wait_s
        while self.now_s < ends_at_s:
            due_s = min(ends_at_s, self.now_s + BOUNDS.period_s)
            own_s = self.table.deadline_s
            self.now_s = min(due_s, max(own_s, self.now_s)) if own_s is not None else due_s
            self.give(Tick())
            if own_s is not None and self.now_s == own_s == self.table.deadline_s:
                break  # the deadline stands: nothing was due after all
        self.now_s = max(self.now_s, ends_at_s)
        self.give(Tick())

    @invariant()
    def the_picture_holds(self) -> None:
        self.table.check()

    @invariant()
    def it_serves_only_when_all_are_ready(self) -> None:
        assert not self.is_up() or self.readied == set(range(self.num_ranks))
        if self.table.phase in (Phase.STARTING, Phase.LOADING):
            assert self.readied != set(range(self.num_ranks))

    @invariant()
    def a_cause_is_declared_once_and_after_the_kill(self) -> None:
        causes = [i for i, effect in enumerate(self.effects) if isinstance(effect, Declare)]
        assert len(causes) <= 1
        assert all(self.effects[i - 1] == KillAll() for i in causes)

    @invariant()
    def each_step_of_the_end_comes_once(self) -> None:
        for kind in (Serve, TellStop, TellLeave, End):
            assert sum(isinstance(effect, kind) for effect in self.effects) <= 1
        if any(isinstance(effect, End) for effect in self.effects):
            assert isinstance(self.effects[-1], End)

    @invariant()
    def a_stop_ends_in_time(self) -> None:
        if self.stop_asked_at_s is not None:
            is_live = TellStop() in self.effects
            first_s = BOUNDS.stop_live_s_max + BOUNDS.stop_dead_s_max if is_live else 0.0
            bound_s = first_s + BOUNDS.stop_dead_s_max + BOUNDS.period_s
            assert self.table.phase is Phase.ENDED or self.now_s - self.stop_asked_at_s <= bound_s

    @invariant()
    def leave_is_given_once_everybody_is_done_or_gone(self) -> None:
        assert TellLeave() not in self.effects or self.over >= set(range(self.num_ranks))

    @invariant()
    def a_member_is_welcomed_once_its_leader_is_known(self) -> None:
        welcomed = [effect.rank for effect in self.effects if isinstance(effect, Welcome)]
        assert not welcomed or welcomed[0] == 0
        assert set(welcomed) <= self.helloed

    @invariant()
    def a_seen_death_is_the_cause(self) -> None:
        if self.first_death_s is not None and self.table.cause:
            assert "is gone" in self.table.cause or "words" in self.table.cause

    @invariant()
    def a_death_is_declared_in_time(self) -> None:
        if self.first_death_s is not None and self.now_s - self.first_death_s > 2 * BOUNDS.period_s:
            assert self.table.cause


WorldMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestWorldMachine = WorldMachine.TestCase
