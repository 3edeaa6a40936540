"""What an engine does besides serving: sleep, profile, LoRA books, statistics, KV events.

`Engine.control` gives one. Every method is called on the loop's thread, between
steps, and returns soon; what takes long and touches no engine (writing a trace)
is handed out as an object for another thread. An error of these methods ends the
call alone: each has severity REQUEST, and the engine goes on as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from executor.engine.control import PROFILE_S, Method


class IterationStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step in numbers. Counts are as they stand after it, tokens those of this step."""

    step_index: int
    """Counts steps since the engine began; a gap tells of steps nobody asked about."""
    step_ms: float
    num_queued: int
    num_running: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_finished: int
    """Requests that this step answered for the last time, however they ended."""
    blocks_free: int
    blocks_total: int


class _KvEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    sequence: int
    """One more for each event of this engine; where numbers are missing, events were lost
    and `kv_snapshot` is the way back."""


class KvStored(_KvEvent, frozen=True, kw_only=True):
    """These full blocks, each the next one's parent, can be reused from now on."""

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes
    """Of the block before the first one; the chain's root (common/hashing) where there is none."""
    num_tokens: int


class KvRemoved(_KvEvent, frozen=True, kw_only=True):
    block_hashes: tuple[bytes, ...]


class KvCleared(_KvEvent, frozen=True, kw_only=True):
    """Nothing is stored any more."""


KvEvent: TypeAlias = KvStored | KvRemoved | KvCleared


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored once every event up to `sequence` has happened, and none after it."""

    sequence: int
    block_hashes: tuple[bytes, ...]
    tokens_per_block: int


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class TraceExport:
    """A profile that was recorded and is not written yet. May go to another thread."""

    path: str
    num_steps: int
    write: Callable[[], int]
    """Write the file, which takes seconds; its size in bytes. Raises RequestFailedError."""
    recorded_s: float = 0.0
    is_full: bool = False
    """It ended before it was stopped, since a trace takes memory: later steps are not in it."""


class EngineControl(Protocol):
    """See the module's docstring for threads and severity."""

    @property
    def is_asleep(self) -> bool: ...

    def sleep(self) -> None:
        """Give the KV pool's memory and the weights back; what was cached is forgotten.

        Asleep already: nothing happens. While asleep `submit` raises NotNowError.
        Raises NotNowError, naming who holds on, while requests run or wait or a lease
        or transfer is live; UnsupportedError on a device or wire where it cannot be done.
        """

    def wake_up(self) -> None:
        """Load the weights from their files again; `progress` grows meanwhile.

        Awake already: nothing happens. Raises ConfigError or RequestFailedError where
        they cannot be loaded or are no longer the same; the engine then stays asleep.
        """

    def start_profile(self, path: str, max_s: float = PROFILE_S) -> None:
        """Record steps from now on, a bounded number, for the trace file `path`.

        After `max_s` it ends and is written without being asked, since whoever started it
        may be gone. Until then no other profile can start.

        The torch engine's is full after some 160 layers run (5 steps of 32 layers).
        Raises NotNowError while a profile is under way, InvalidRequestError for a path
        that is not absolute or whose folder cannot be written to.
        """

    def stop_profile(self) -> TraceExport:
        """End recording, or tell of what its time has ended, once. Raises NotNowError where
        none was started."""

    def drop_profile(self, path: str) -> None:
        """End recording for this path, if that is what is under way; nothing is written."""

    def load_lora(self, name: str, path: str) -> None:
        """Raises UnsupportedError where the engine has no LoRA; else InvalidRequestError,
        DuplicateRequestError for a name that is loaded, OverloadedError for one too many.
        """

    def unload_lora(self, name: str) -> None:
        """Raises UnsupportedError as `load_lora`, ModelNotFoundError for an unknown name."""

    def list_loras(self) -> tuple[LoraInfo, ...]:
        """In the order of loading; empty where the engine has no LoRA."""

    def listen(self, *, stats: bool, kv_events: bool) -> None:
        """Which of the two somebody wants. Neither is built for nobody; what was not
        taken when listening ends is dropped.
        """

    def take_stats(self) -> IterationStats | None:
        """Of the last step, once; None where nobody listened or nothing ran since."""

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """Since the last call, in order; the oldest were dropped where it was too long ago."""

    def kv_snapshot(self) -> KvSnapshot:
        """What is stored now, whether or not anybody listens."""

    def reset_counters(self) -> None:
        """Event counters of `audit()` start at zero again; gauges and `progress` do not."""

    def methods(self) -> Mapping[str, Method]:
        """What collective_rpc may call on this rank (control.py)."""
