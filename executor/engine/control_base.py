"""What the controls of both engines share: profiles, listeners, the state of sleep.

An engine asks `is_watching` once a step and tells `stepped` what the step did
only where somebody wants to know, so that nobody else pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from executor.engine.control import PROFILE_S, Method, RankFacts, control_methods
from executor.engine.control_seam import (
    EngineControl,
    IterationStats,
    KvEvent,
    TraceExport,
)
from executor.engine.kv_events import KvEventLog
from executor.engine.profiles import Profiles, Tracer
from protos.errors import NotNowError

HOLDERS_NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """An engine's state after a step."""

    num_queued: int
    num_running: int
    blocks_free: int
    blocks_total: int


class ControlBase(EngineControl):
    """See the module's docstring. An engine's own control adds sleep, LoRA and the snapshot."""

    def __init__(
        self,
        *,
        facts: RankFacts,
        tracer: Tracer,
        log: KvEventLog,
        gauges: Callable[[], Gauges],
        clock: Callable[[], float],
    ) -> None:
        self.facts = facts
        self._profiles = Profiles(tracer, clock=clock)
        self._log = log
        self._gauges = gauges
        self._clock = clock
        self._listens_to_stats = False
        self._stats: IterationStats | None = None
        self._num_stats_built = 0
        self._is_asleep = False

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    def check_awake(self) -> None:
        """Raises NotNowError."""
        if self._is_asleep:
            raise NotNowError("the engine is asleep; wake it up first", field="is_asleep")

    def refuse_held(self, holders: Sequence[str]) -> None:
        """Raises NotNowError naming the first of those that keep the engine from sleeping."""
        if not holders:
            return
        names = ", ".join(holders[:HOLDERS_NAMED_MAX])
        more = len(holders) - HOLDERS_NAMED_MAX
        raise NotNowError(
            f"the engine cannot sleep while it is needed by {names}"
            + (f" and {more} more" if more > 0 else ""),
            field="sleep",
            value=names,
            limit="no request, lease or transfer",
        )

    # --- profiles -----------------------------------------------------------

    def start_profile(self, path: str, max_s: float = PROFILE_S) -> None:
        self._profiles.start(path, max_s)

    def stop_profile(self) -> TraceExport:
        return self._profiles.stop()

    def drop_profile(self, path: str) -> None:
        self._profiles.drop(path)

    # --- listening ----------------------------------------------------------

    def listen(self, *, stats: bool, kv_events: bool) -> None:
        self._listens_to_stats = stats
        self._stats = self._stats if stats else None
        self._log.listen(kv_events)

    def take_stats(self) -> IterationStats | None:
        stats, self._stats = self._stats, None
        return stats

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        return self._log.take()

    @property
    def is_watching(self) -> bool:
        """Whether `stepped` wants to be told of the next step."""
        return self._listens_to_stats or self._profiles.is_under_way

    def next_due_s(self, due_s: float | None) -> float | None:
        """When the engine has to step, on its clock, if `due_s` is when its requests want it."""
        ends_s = self._profiles.due_s
        if ends_s is None:
            return due_s
        return ends_s if due_s is None else min(ends_s, due_s)

    def stepped(
        self,
        *,
        step_index: int,
        began_s: float,
        num_outputs: int,
        num_finished: int,
        num_prefill_tokens: int,
        num_decode_tokens: int,
    ) -> None:
        ended_s = self._clock()
        self._profiles.on_step(began_s, ended_s, num_outputs)
        if not self._listens_to_stats:
            return
        gauges = self._gauges()
        self._num_stats_built += 1
        self._stats = IterationStats(
            step_index=step_index,
            step_ms=(ended_s - began_s) * 1000,
            num_queued=gauges.num_queued,
            num_running=gauges.num_running,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_finished=num_finished,
            blocks_free=gauges.blocks_free,
            blocks_total=gauges.blocks_total,
        )

    # --- the rest -----------------------------------------------------------

    def methods(self) -> Mapping[str, Method]:
        return control_methods(self, self.facts)

    def counters(self) -> dict[str, int]:
        """For the audit."""
        return {
            "stats_built": self._num_stats_built,
            "kv_events_built": self._log.num_built,
            "kv_events_dropped": self._log.num_dropped,
            "is_asleep": int(self._is_asleep),
        }

    def close(self) -> None:
        self._profiles.close()
