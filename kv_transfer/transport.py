"""The Transport seam: moves frames and memory between two engines.

A transport is owned by one thread, which loops on `poll`. Only `wake` may be
called from another thread. Nothing here blocks but `poll`, and no method
raises for what a peer did: that arrives as an event.

Contract, run as one suite for every implementation (tests/contract):

- `connect` is cheap and idempotent per address; a peer that cannot be reached
  shows as `PeerDown`, not as an exception. A peer that stopped, or closed while
  its process lives on, may go unnoticed: heartbeats are the transceiver's work.
- Frames to one peer arrive whole and in order, or the peer goes down.
- A segment is sent from scattered memory and received into scattered memory;
  the two lists may be cut differently, their totals must match.
- `SegmentSent` says the memory may be reused, not that the peer has it.
- A receive is posted only after the peer announced the segment. Once posted it
  ends by exactly one `SegmentReceived`, also when the peer dies; until then the
  memory belongs to the transport. There is no cancel of a started receive.
- `close_peer` ends every pending operation of that peer, each by its event
  (with an error), before or together with `PeerDown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Region: TypeAlias = tuple[int, int]
"""(address, number of bytes) of one contiguous piece of registered memory."""


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """The sender names itself inside the frame; UCX tags do not tell who sent one."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class SegmentSent:
    operation: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class SegmentReceived:
    operation: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeerDown:
    peer: int
    cause: str


TransportEvent: TypeAlias = FrameReceived | SegmentSent | SegmentReceived | PeerDown


class Transport(Protocol):
    """See the module's docstring for the contract."""

    name: str

    @property
    def address(self) -> bytes:
        """Opaque bytes by which another transport of this name connects to us."""

    def connect(self, address: bytes) -> int:
        """The peer's number, stable until its `PeerDown`."""

    def send_frame(self, peer: int, frame: bytes) -> None:
        """Queue a control frame of at most FRAME_BYTES_MAX bytes."""

    def send_segment(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        """Start sending; the operation's number comes back in `SegmentSent`."""

    def post_receive(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        """Start receiving what `peer` announced under `tag` (48 bits, minted by us)."""

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """Progress; sleep at most `timeout_s` while nothing happens; return what happened."""

    def wake(self) -> None:
        """Make a sleeping `poll` return. From any thread."""

    def close_peer(self, peer: int, cause: str) -> None:
        """End this peer's operations and forget it."""

    def close(self) -> None:
        """Close every peer and free the transport. Bounded; idempotent."""

    def describe(self) -> str:
        """Which wires are really in use, e.g. "posix,cma" or "tcp"."""


FRAME_BYTES_MAX = 1 << 20
