"""The control of a rank that has no engine: it keeps the world's books with the leader.

It takes part in every coordinated call and answers for its own process. It runs
no steps, stores no KV and holds no weights, so its profile is empty, its sleep
frees nothing, and it has no statistics to give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from executor.engine.control import PROFILE_S, Method, RankFacts, control_methods
from executor.engine.control_seam import (
    IterationStats,
    KvEvent,
    KvSnapshot,
    LoraInfo,
    TraceExport,
)
from executor.engine.loras import LoraBook
from executor.engine.profiles import NAME_BYTES_MAX, Profiles, StepTracer

RANK_BYTES_MAX = 16
"""What its rank adds to a file's name that the leader has taken."""


class MemberControl:
    """Implements EngineControl for rank > 0; its leader's checks come first."""

    def __init__(self, facts: RankFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._facts = facts
        self._clock = clock
        tracer = StepTracer(f"rank {facts.rank}")
        self._profiles = Profiles(tracer, NAME_BYTES_MAX + RANK_BYTES_MAX, clock)
        self._loras = LoraBook()
        self._is_asleep = False

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    def sleep(self) -> None:
        self._is_asleep = True

    def wake_up(self) -> None:
        self._is_asleep = False

    def start_profile(self, path: str, max_s: float = PROFILE_S) -> None:
        """Every rank writes a file of its own: this one's name has the rank in it."""
        self._profiles.start(rank_path(path, self._facts.rank), max_s)

    def stop_profile(self) -> TraceExport:
        return self._profiles.stop()

    def drop_profile(self, path: str) -> None:
        self._profiles.drop(rank_path(path, self._facts.rank))

    def wait_s(self) -> float | None:
        """How long the rank may wait for a call before it takes its `turn`; None: for good."""
        due_s = self._profiles.due_s
        return None if due_s is None else max(due_s - self._clock(), 0.0)

    def turn(self) -> None:
        self._profiles.turn()

    def close(self) -> None:
        self._profiles.close()

    def load_lora(self, name: str, path: str) -> None:
        self._loras.load(name, path)

    def unload_lora(self, name: str) -> None:
        self._loras.unload(name)

    def list_loras(self) -> tuple[LoraInfo, ...]:
        return self._loras.loaded()

    def listen(self, *, stats: bool, kv_events: bool) -> None:
        """The leader's alone to tell."""

    def take_stats(self) -> IterationStats | None:
        return None

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        return ()

    def kv_snapshot(self) -> KvSnapshot:
        return KvSnapshot(sequence=0, block_hashes=(), tokens_per_block=0)

    def reset_counters(self) -> None:
        """It counts nothing."""

    def methods(self) -> Mapping[str, Method]:
        return control_methods(self, self._facts)


def rank_path(path: str, rank: int) -> str:
    """`trace.json` as rank 2 calls it: `trace.rank2.json`."""
    asked = Path(path)
    stem, dot, suffixes = asked.name.partition(".")
    return str(asked.with_name(f"{stem}.rank{rank}{dot}{suffixes}")) if asked.name else path
