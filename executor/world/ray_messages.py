"""What crosses between the launcher in the owner's process and the Ray driver, its child."""

from __future__ import annotations

from typing import BinaryIO, TypeAlias

import msgspec

LENGTH_BYTES = 4


class DriverOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Over the driver's standard input, length first, which then stays open."""

    address: str
    """The cluster to join; empty: one of our own, in `folder`."""
    folder: str
    num_cpus_per_rank: int
    num_gpus_per_rank: int
    place_s_max: float
    """For the actors to find their places."""
    events_fd: int
    """An inherited socket that takes each event as one packet."""
    ranks: tuple[bytes, ...]
    """Packed orders, which the actors take as an argument."""


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Joined(_Event, frozen=True):
    """The cluster is there."""


class Placed(_Event, frozen=True):
    """Every rank's process is started."""


class Refused(_Event, frozen=True):
    """It cannot be done; `field` is the setting to mend. Nothing follows."""

    field: str
    words: str


class RankEnded(_Event, frozen=True):
    rank: int
    words: str


DriverEvent: TypeAlias = Joined | Placed | Refused | RankEnded


def pack_driver_orders(orders: DriverOrders) -> bytes:
    body = msgspec.msgpack.encode(orders)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_driver_orders(stream: BinaryIO) -> DriverOrders:
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(stream.read(length), type=DriverOrders)
