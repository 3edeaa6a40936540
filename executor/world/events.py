"""What a world's table is told, and what it orders: one closed union each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

LAUNCHER = -1
"""Stands for the launcher's own process where a rank is asked for."""

# --- events -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Helloed:
    """`is_seen`: its end is seen here (its process is on this host, or the launcher tells)."""

    rank: int
    name: str
    is_seen: bool = True


@dataclass(frozen=True, slots=True)
class Readied:
    rank: int


@dataclass(frozen=True, slots=True)
class Heard:
    rank: int


@dataclass(frozen=True, slots=True)
class Died:
    """Its own last words."""

    rank: int
    words: str


@dataclass(frozen=True, slots=True)
class Done:
    """It was told to stop and has closed everything; it waits for leave to end."""

    rank: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The process of a rank, or the launcher's, has ended."""

    rank: int
    words: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """`is_well`: it may take its time; a world in trouble gets the short bound."""

    is_well: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event: TypeAlias = (
    Helloed | Readied | Heard | Died | Done | Gone | GiveUp | StopAsked | Tick
)  # fmt: skip


# --- effects ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Ack of a HELLO: the rank may load. A member's waits for rank 0's, whose endpoint it tells."""

    rank: int


@dataclass(frozen=True, slots=True)
class AckReady:
    rank: int


@dataclass(frozen=True, slots=True)
class Assembled:
    """Every rank is known; all load now."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Every rank is ready."""


@dataclass(frozen=True, slots=True)
class TellStop:
    pass


@dataclass(frozen=True, slots=True)
class TellLeave:
    pass


@dataclass(frozen=True, slots=True)
class KillAll:
    pass


@dataclass(frozen=True, slots=True)
class Declare:
    cause: str


@dataclass(frozen=True, slots=True)
class End:
    """`leaks` names what was abandoned."""

    leaks: tuple[str, ...]


Effect: TypeAlias = (
    Welcome | AckReady | Assembled | Serve | TellStop | TellLeave | KillAll | Declare | End
)
