"""What the broker's table is told, and what it wants done. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from executor.attach.messages import Attach, FromBroker, Knock
from executor.world.orders import ProcessName
from protos.errors import ErrorData

# --- events: what the shell tells ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Knocked:
    route: bytes
    key_id: str
    message: Knock


@dataclass(frozen=True, slots=True)
class Asked:
    route: bytes
    key_id: str
    message: Attach


@dataclass(frozen=True, slots=True)
class Left:
    """Its goodbye, sealed with its own key."""

    route: bytes
    frontend_id: int


@dataclass(frozen=True, slots=True)
class LaneOpen:
    frontend_id: int
    requests_endpoint: str
    results_endpoint: str


@dataclass(frozen=True, slots=True)
class LaneRefused:
    frontend_id: int
    error: ErrorData


@dataclass(frozen=True, slots=True)
class LaneGone:
    """Rank 0 has closed it by itself."""

    frontend_id: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    frontend_id: int


@dataclass(frozen=True, slots=True)
class WorldUp:
    """`leader_host`: where rank 0 is reached; "" where the broker is."""

    leader: ProcessName
    leader_host: str


@dataclass(frozen=True, slots=True)
class WorldDown:
    cause: str


Event: TypeAlias = (
    Knocked | Asked | Left | LaneOpen | LaneRefused | LaneGone | ProcessGone | WorldUp | WorldDown
)


# --- effects: what the shell does ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Sealed with the attach key."""

    route: bytes
    key_id: str
    message: FromBroker


@dataclass(frozen=True, slots=True)
class Tell:
    """Sealed with the lane's key."""

    route: bytes
    frontend_id: int
    key: bytes = field(repr=False)
    message: FromBroker


@dataclass(frozen=True, slots=True)
class OpenLane:
    frontend_id: int
    key: bytes = field(repr=False)
    silence_s: float
    num_buckets: int


@dataclass(frozen=True, slots=True)
class CloseLane:
    frontend_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell `ProcessGone` when this process ends, where it can be seen."""

    frontend_id: int
    process: ProcessName


@dataclass(frozen=True, slots=True)
class Unwatch:
    frontend_id: int


Effect: TypeAlias = Answer | Tell | OpenLane | CloseLane | Watch | Unwatch
