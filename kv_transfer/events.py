"""What the engine tells the transceiver, and what it hears back.

On the context side a lease pins the blocks of a finished prompt; on the
generation side a pull fills reserved blocks. The engine's block manager names
the holders: `lease:<id>` from `Offer` to `LeaseEnded`, `transfer:<id>` from
`TransferStarted` (or `Pull`) to `TransferEnded` (or `PullFinished`,
`PullFailed`). Events come in the order in which things happened, so a block is
held by one name or the other at every instant while UCX may touch it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from protos.errors import ErrorData
from protos.messages import DisaggRequestId, KvLayout, KvStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """The registered KV pool: block i lies at `base_address + i * block_bytes`."""

    base_address: int
    num_blocks: int
    layout: KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Context side: these blocks, in prompt order, may be pulled with this token."""

    disagg_request_id: DisaggRequestId
    pull_token: bytes
    block_ids: tuple[int, ...]
    num_tokens: int
    lease_s: float
    deadline_s: float
    """What remains of the request's deadline; no renewal outlives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Generation side: fill `block_ids` from the source blocks at `positions`.

    `positions[i]` is the index, in prompt order, of the source block that fills
    `block_ids[i]`. Both are empty where the prefix cache held everything: the
    pull then only acknowledges.
    """

    disagg_request_id: DisaggRequestId
    pull_token: bytes
    source_address: bytes
    source_incarnation: int
    source_layout: KvLayout
    num_source_blocks: int
    block_ids: tuple[int, ...]
    positions: tuple[int, ...]
    num_tokens: int
    """Prompt tokens whose KV these blocks bring."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """Context side: a peer's pull was accepted; operations may read the blocks."""

    disagg_request_id: DisaggRequestId


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """Context side: no operation reads the blocks any more."""

    disagg_request_id: DisaggRequestId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Context side. `cause`: acked, released, expired, aborted, peer_down, closed."""

    disagg_request_id: DisaggRequestId
    cause: str


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Generation side: every block arrived and was verified; nothing touches them."""

    disagg_request_id: DisaggRequestId
    stats: KvStats


@dataclass(frozen=True, slots=True)
class PullFailed:
    """Generation side: it failed or was aborted, and nothing touches the blocks any more."""

    disagg_request_id: DisaggRequestId
    error: ErrorData


TransceiverEvent: TypeAlias = (
    TransferStarted | TransferEnded | LeaseEnded | PullFinished | PullFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Bounds of the data plane. A stall is time without progress, not time in a queue."""

    segment_bytes_max: int = 4 << 20
    segments_in_flight_max: int = 4
    pulls_in_flight_max: int = 64
    stall_s: float = 3.0
    heartbeat_s: float = 1.0
    tombstones_max: int = 4096
    frame_queue_max: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TransceiverAudit:
    """Counts that must return to the baseline when nothing is in flight."""

    leases: int = 0
    transfers: int = 0
    pulls: int = 0
    operations: int = 0
    peers: int = 0
    counters: dict[str, int] = field(default_factory=dict)
