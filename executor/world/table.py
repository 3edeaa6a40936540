"""The start and death of a world, pure: events in, effects out, time as a parameter.

    STARTING ──every rank said HELLO──> LOADING ──every rank READY──> SERVING
    STARTING, LOADING, SERVING ──a death is seen──> SUSPECT ──last words read──> DEAD
    STARTING, LOADING ──overdue──> DEAD          SERVING ──a rank long silent──> SUSPECT
    SERVING ──stop──> STOPPING ──all done──> LEAVING ──all gone──> ENDED
    any other ──stop──> KILLING ──all gone, or the bound──> ENDED
    STOPPING, LEAVING ──the bound, or a silent rank──> KILLING
    STOPPING ──rank 0 gone before its word──> KILLING
    STOPPING ──another death, or rank 0 done──> the short bound

Detection (`Gone`, `Died`) only makes the world suspect; what it means is decided once, when
the last words are read: then survivors are killed first and the cause is declared after.
The first cause stays. What has not ended within its bound is abandoned and named.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import assert_never

from executor.world.events import (
    LAUNCHER,
    AckReady,
    Assembled,
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


class Phase(enum.StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    SERVING = "serving"
    SUSPECT = "suspect"
    DEAD = "dead"
    STOPPING = "stopping"
    LEAVING = "leaving"
    KILLING = "killing"
    ENDED = "ended"


RISING = (Phase.STARTING, Phase.LOADING)
ALIVE = (*RISING, Phase.SERVING)
ENDING = (Phase.STOPPING, Phase.LEAVING, Phase.KILLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBounds:
    hello_s_max: float = 60.0
    load_s_max: float = 1800.0
    last_words_s: float = 0.1
    silence_s: float = 3.0
    """A rank that said nothing for so long is in trouble; while stopping it is killed."""
    give_up_s: float = 30.0
    """A rank silent for so long counts as dead."""
    period_s: float = 1.0
    """How often `Tick` comes at least; longer, and it was the owner who slept."""
    stop_live_s_max: float = 180.0
    stop_dead_s_max: float = 5.0


@dataclass(slots=True)
class _Rank:
    name: str
    heard_at_s: float
    has_hello: bool = False
    is_ready: bool = False
    is_done: bool = False
    is_gone: bool = False
    is_seen: bool = True


@dataclass(slots=True)
class WorldTable:
    """See the module's docstring.

    `has_launcher`: the launcher has a process of its own. `sees_strangers`: the end of a rank
    that never said HELLO is seen too. `watches_leader`: rank 0's silence while it serves is
    judged here; not where the owner has a lane, whose heartbeat tells more.
    """

    num_ranks: int
    bounds: WorldBounds
    has_launcher: bool = False
    sees_strangers: bool = True
    watches_leader: bool = True
    started_at_s: float = 0.0
    phase: Phase = Phase.STARTING
    cause: str = ""
    """Set once, by the declaration."""
    num_ignored: int = 0
    """Events that came late, twice or for a rank that does not exist."""
    _ranks: list[_Rank] = field(default_factory=list)
    _launcher_is_gone: bool = False
    _words: list[str] = field(default_factory=list)
    _given_up: str = ""
    _exits: list[str] = field(default_factory=list)
    _deadline_s: float = 0.0
    _ticked_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._ranks = [_Rank(f"rank {i}", self.started_at_s) for i in range(self.num_ranks)]
        self._launcher_is_gone = not self.has_launcher
        self._deadline_s = self.started_at_s + self.bounds.hello_s_max
        self._ticked_at_s = self.started_at_s

    # --- what is known --------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        """When `Tick` must come even without news; None: never."""
        if self.phase in (Phase.SERVING, Phase.DEAD, Phase.ENDED):
            return None
        return self._deadline_s

    def trouble(self, now_s: float) -> str:
        """Which rank is silent, in words; empty while all are heard."""
        if self.phase is not Phase.SERVING:
            return ""
        now_s = min(now_s, self._ticked_at_s + self.bounds.period_s)  # later, and it was we
        limit_s = self.bounds.silence_s
        for rank in self._silent(now_s, limit_s):
            silent_s = now_s - rank.heard_at_s
            limit = f"limit {limit_s:g} s, health.silence_ms"
            return f"{rank.name} has said nothing for {silent_s:.1f} s ({limit})"
        return ""

    def check(self) -> None:
        """Raises AssertionError where the picture contradicts itself."""
        ranks = self._ranks
        assert len(ranks) == self.num_ranks
        assert all(rank.has_hello or not rank.is_ready for rank in ranks)
        assert self.phase is not Phase.LOADING or all(rank.has_hello for rank in ranks)
        assert self.phase is not Phase.SERVING or all(rank.is_ready for rank in ranks)
        assert bool(self.cause) == (self.phase in (Phase.DEAD, *ENDING, Phase.ENDED))
        assert self.phase not in ALIVE or not self._exits

    # --- the machine ----------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Helloed() | Readied() | Heard() | Died() | Done():
                return self._on_rank(event, now_s)
            case Gone():
                return self._on_gone(event, now_s)
            case GiveUp():
                return self._on_give_up(event.why, now_s)
            case StopAsked():
                return self._on_stop(event.is_well, now_s)
            case Tick():
                return self._on_tick(now_s)
            case _:
                assert_never(event)

    def _on_rank(
        self, event: Helloed | Readied | Heard | Died | Done, now_s: float
    ) -> list[Effect]:
        if not 0 <= event.rank < self.num_ranks or self.phase is Phase.ENDED:
            self.num_ignored += 1
            return []
        rank = self._ranks[event.rank]
        rank.heard_at_s = now_s
        match event:
            case Helloed():
                return self._on_hello(event, now_s)
            case Readied():
                return self._on_ready(event.rank)
            case Died():
                return self._on_died(rank, event.words, now_s)
            case Done():
                rank.is_done = True
                if event.rank == 0:  # members were told before; who missed it is not waited for
                    self._hasten(now_s)
                return self._go_on_ending(now_s)
            case Heard():
                return []
            case _:
                assert_never(event)

    def _on_hello(self, event: Helloed, now_s: float) -> list[Effect]:
        if self.phase not in ALIVE:
            self.num_ignored += 1
            return []
        rank = self._ranks[event.rank]
        is_new = not rank.has_hello
        rank.has_hello, rank.name, rank.is_seen = True, event.name, event.is_seen
        if event.rank != 0 and not self._ranks[0].has_hello:
            return []  # its ack comes with rank 0's
        effects: list[Effect] = [Welcome(event.rank)]
        if is_new and event.rank == 0:
            waiting = (i for i in range(1, self.num_ranks) if self._ranks[i].has_hello)
            effects += [Welcome(i) for i in waiting]
        if self.phase is Phase.STARTING and all(rank.has_hello for rank in self._ranks):
            self.phase = Phase.LOADING
            self._deadline_s = now_s + self.bounds.load_s_max
            effects += [Assembled(), *self._serve_if_ready()]
        return effects

    def _on_ready(self, index: int) -> list[Effect]:
        rank = self._ranks[index]
        if self.phase not in ALIVE or not rank.has_hello:
            self.num_ignored += 1
            return []
        rank.is_ready = True
        return [AckReady(index), *self._serve_if_ready()]

    def _serve_if_ready(self) -> list[Effect]:
        if self.phase is Phase.LOADING and all(rank.is_ready for rank in self._ranks):
            self.phase = Phase.SERVING
            return [Serve()]
        return []

    # --- death ----------------------------------------------------------------

    def _on_died(self, rank: _Rank, words: str, now_s: float) -> list[Effect]:
        if self.phase in (*ALIVE, Phase.SUSPECT):
            self._words.append(words if self.num_ranks == 1 else f"{rank.name}: {words}")
            self._suspect(now_s)
        return []

    def _on_gone(self, event: Gone, now_s: float) -> list[Effect]:
        if event.rank == LAUNCHER:
            is_late, self._launcher_is_gone = self._launcher_is_gone, True
        elif 0 <= event.rank < self.num_ranks:
            rank = self._ranks[event.rank]
            is_late, rank.is_gone = rank.is_gone, True
        else:
            is_late = True
        if is_late:
            self.num_ignored += 1
            return []
        if self.phase in (*ALIVE, Phase.SUSPECT):
            self._exits.append(event.words)
            self._suspect(now_s)
        return self._go_on_without(event.rank, now_s)

    def _go_on_without(self, gone: int, now_s: float) -> list[Effect]:
        """A death while stopping: no orderly end is left to be waited for. Only rank 0 tells
        members to stop, so without its word none of them would ever hear of it."""
        if self.phase is Phase.STOPPING:
            self._hasten(now_s)
            if gone == 0 and not self._ranks[0].is_done:
                return self._kill(now_s)
        return self._go_on_ending(now_s)

    def _hasten(self, now_s: float) -> None:
        if self.phase is Phase.STOPPING:
            self._deadline_s = min(self._deadline_s, now_s + self.bounds.stop_dead_s_max)

    def _on_give_up(self, why: str, now_s: float) -> list[Effect]:
        """Whoever does not come back is killed at once; the last words are read meanwhile."""
        if self.phase not in (*ALIVE, Phase.SUSPECT):
            return []
        self._given_up = self._given_up or why
        self._suspect(now_s)
        return [KillAll()]

    def _suspect(self, now_s: float) -> None:
        if self.phase is not Phase.SUSPECT:
            self.phase = Phase.SUSPECT
            self._deadline_s = now_s + self.bounds.last_words_s

    def _declare(self, phase: Phase) -> list[Effect]:
        """Survivors are killed before the world counts as dead."""
        parts = [self._given_up] if self._given_up else []
        self.cause = "; ".join((*parts, *self._words, *self._exits)) or "nobody said why"
        self.phase = phase
        return [KillAll(), Declare(self.cause)]

    # --- end ------------------------------------------------------------------

    def _on_stop(self, is_well: bool, now_s: float) -> list[Effect]:
        if self.phase is Phase.SERVING:
            bounds = self.bounds
            self.phase, self.cause = Phase.STOPPING, SHUT_DOWN
            bound_s = bounds.stop_live_s_max if is_well else bounds.stop_dead_s_max
            self._deadline_s = now_s + bound_s
            return [TellStop()]
        if self.phase in (*ENDING, Phase.ENDED):
            return []
        effects: list[Effect] = []
        if self.phase is Phase.SUSPECT:
            effects = self._declare(Phase.DEAD)
        self.cause = self.cause or SHUT_DOWN
        return [*effects, *self._kill(now_s)]

    def _kill(self, now_s: float) -> list[Effect]:
        self.phase = Phase.KILLING
        self._deadline_s = now_s + self.bounds.stop_dead_s_max
        return [KillAll(), *self._go_on_ending(now_s)]

    def _go_on_ending(self, now_s: float) -> list[Effect]:
        if self.phase not in ENDING:
            return []
        effects: list[Effect] = []
        if self.phase is Phase.STOPPING and all(r.is_done or r.is_gone for r in self._ranks):
            self.phase = Phase.LEAVING
            self._deadline_s = now_s + self.bounds.stop_dead_s_max
            effects.append(TellLeave())
        if self._launcher_is_gone and all(self._has_ended(rank) for rank in self._ranks):
            self.phase = Phase.ENDED
            effects.append(End(()))
        return effects

    def _has_ended(self, rank: _Rank) -> bool:
        """Whom nobody here can see counts as ended with its word that it is done."""
        if not rank.has_hello and not self.sees_strangers:
            return True
        if rank.is_seen:
            return rank.is_gone
        return rank.is_gone or (rank.is_done and self.phase is not Phase.STOPPING)

    # --- time -----------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        self._forgive_own_sleep(now_s)
        match self.phase:
            case Phase.STARTING | Phase.LOADING:
                return self._on_overdue_start(now_s)
            case Phase.SERVING:
                return self._on_long_silence(now_s)
            case Phase.SUSPECT:
                return self._declare(Phase.DEAD) if now_s >= self._deadline_s else []
            case Phase.STOPPING | Phase.LEAVING:
                is_over = now_s >= self._deadline_s or self._silent(now_s, self.bounds.silence_s)
                return self._kill(now_s) if is_over else []
            case Phase.KILLING:
                return self._abandon() if now_s >= self._deadline_s else []
            case Phase.DEAD | Phase.ENDED:
                return []
            case _:
                assert_never(self.phase)

    def _forgive_own_sleep(self, now_s: float) -> None:
        """What the ranks said while the owner stood still is yet to be read. Short ones count
        too: several in a row would add up to a silence."""
        slept_s = max(0.0, now_s - self._ticked_at_s - self.bounds.period_s)
        self._ticked_at_s = now_s
        for rank in self._ranks:
            rank.heard_at_s = min(now_s, rank.heard_at_s + slept_s)

    def _on_overdue_start(self, now_s: float) -> list[Effect]:
        bounds = self.bounds
        if now_s < self._deadline_s:
            return self._on_long_silence(now_s) if self.phase is Phase.LOADING else []
        if self.phase is Phase.STARTING:
            late = [rank.name for rank in self._ranks if not rank.has_hello]
            what = f"did not start within {bounds.hello_s_max:g} s"
        else:
            late = [rank.name for rank in self._ranks if not rank.is_ready]
            what = f"did not load its model within {bounds.load_s_max:g} s"
        self._words.append(f"{', '.join(late)} {what}")
        return self._declare(Phase.DEAD)

    def _on_long_silence(self, now_s: float) -> list[Effect]:
        """A rank whose end is seen may be silent while it loads."""
        for rank in self._silent(now_s, self.bounds.give_up_s):
            if rank.is_seen and self.phase is Phase.LOADING:
                continue
            why = f"{rank.name} said nothing for {self.bounds.give_up_s:g} s, and was killed"
            return self._on_give_up(why, now_s)
        return []

    def _silent(self, now_s: float, bound_s: float) -> list[_Rank]:
        watched = self._ranks
        if self.phase is Phase.SERVING and not self.watches_leader:
            watched = watched[1:]
        waited = (rank for rank in watched if not rank.is_gone and not rank.is_done)
        return [rank for rank in waited if now_s - rank.heard_at_s > bound_s]

    def _abandon(self) -> list[Effect]:
        left = [rank for rank in self._ranks if not self._has_ended(rank)]
        leaks = [
            f"{rank.name} {'does not end' if rank.is_seen else 'was not seen to end'}"
            for rank in left
        ]
        if not self._launcher_is_gone:
            leaks.append("the launcher's process does not end")
        self.phase = Phase.ENDED
        return [End(tuple(leaks))]


SHUT_DOWN = "it was shut down"
