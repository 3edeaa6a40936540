"""What crosses the status socket: one closed union per direction.

A rank repeats its HELLO, READY and last words until they are acked; everything else may be
lost with the connection, whose end is then seen elsewhere.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from executor.engine.seam import EngineIdentity
from executor.lane import LaneSpec
from executor.world.orders import ProcessName
from protos.errors import ErrorData

STATUS_LINK = "status"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- rank to owner --------------------------------------------------------------


class RankHello(_Message, frozen=True):
    """Who the rank is, before it loads anything. Rank 0 adds where its members find it."""

    process: ProcessName
    leader_endpoint: str = ""
    leader_curve_key: str = ""


class RankJoined(_Message, frozen=True):
    """A member is connected to the leader; no socket file is needed for it any more."""


class RankReady(_Message, frozen=True):
    """Rank 0 tells the engine's identity."""

    identity: EngineIdentity | None = None


class RankBeat(_Message, frozen=True):
    pass


class RankDied(_Message, frozen=True):
    """Its last words."""

    error: ErrorData


class RankDone(_Message, frozen=True):
    """It was told to stop, has closed everything and waits for leave to end."""


class LaneOpened(_Message, frozen=True):
    """`spec` has the endpoints that were taken; or why it could not be opened."""

    frontend_id: int
    spec: LaneSpec | None = None
    error: ErrorData | None = None


class LaneClosed(_Message, frozen=True):
    """By rank 0 itself: its frontend does not read."""

    frontend_id: int
    why: str


ToOwner: TypeAlias = (
    RankHello | RankJoined | RankReady | RankBeat | RankDied | RankDone | LaneOpened | LaneClosed
)


# --- owner to rank --------------------------------------------------------------


class HelloAck(_Message, frozen=True):
    """The rank may load. A member learns where rank 0 listens."""

    leader_endpoint: str
    leader_curve_key: str


class ReadyAck(_Message, frozen=True):
    pass


class DiedAck(_Message, frozen=True):
    pass


class BeatAck(_Message, frozen=True):
    """The owner's own sign of life."""


class OpenLane(_Message, frozen=True):
    spec: LaneSpec


class CloseLane(_Message, frozen=True):
    frontend_id: int
    why: str


class StopRank(_Message, frozen=True):
    """Rank 0 stops its loop and then its members; all say DONE."""


class Leave(_Message, frozen=True):
    """Everybody is done: the process may end. Under MPI the first exit ends the others."""


ToRank: TypeAlias = (
    HelloAck | ReadyAck | DiedAck | BeatAck | OpenLane | CloseLane | StopRank | Leave
)
