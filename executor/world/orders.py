"""What a rank is told before anything else, and how a process is named for ever.

Orders reach a rank by standard input, an inherited descriptor or MPI, never by argv or the
environment: they hold the world's key.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from executor.config import EngineConfig
from executor.lane import LaneSpec
from executor.limits import ExecutorLimits

LENGTH_BYTES = 4


class ProcessName(msgspec.Struct, frozen=True, array_like=True):
    """`start_ticks` is /proc/PID/stat's field 22; `host` names one set of pids."""

    pid: int
    start_ticks: int
    host: str

    @classmethod
    def own(cls) -> ProcessName:
        return cls(os.getpid(), start_ticks(os.getpid()), own_host())

    def is_here(self) -> bool:
        return self.host == own_host()


def start_ticks(pid: int) -> int:
    """With its pid it names a process for ever. Raises OSError where there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


@functools.cache
def own_host() -> str:
    """Name, boot and pid namespace: equal for two processes that see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def open_pidfd(process: ProcessName) -> int:
    """Raises ProcessLookupError where exactly this process does not run here any more."""
    pidfd = os.pidfd_open(process.pid)
    try:
        is_it = start_ticks(process.pid) == process.start_ticks
    except OSError:
        is_it = False
    if not is_it:
        os.close(pidfd)
        raise ProcessLookupError(f"process {process.pid} is another one by now")
    return pidfd


class RankBounds(msgspec.Struct, frozen=True, kw_only=True):
    heartbeat_s: float
    owner_silence_s_max: float
    """An owner on another host that does not answer for so long is gone."""
    hello_s_max: float
    leave_s_max: float
    """A rank that is done ends by itself where nobody gives it leave for so long."""
    queue_messages_max: int
    message_bytes_max: int
    tombstones_max: int


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    name: str
    rank: int
    num_ranks: int
    key: bytes
    """Of the world: it seals the status socket and the leader's."""
    status_endpoint: str
    status_curve_key: str = ""
    """The owner's public CURVE key; empty on ipc."""
    leader_endpoint: str
    """Where rank 0 binds for its members; "tcp": at its own address, on any port."""
    lane: LaneSpec | None = None
    """The owner's own, opened by rank 0 before it loads."""
    owner: ProcessName
    bounds: RankBounds
    dies_with_parent_thread: bool = False
    """Whether the kernel's parent-death signal may be armed: it fires when the
    *thread* that spawned us ends, so only a main thread may be trusted with it."""


def make_orders(
    config: EngineConfig,
    *,
    name: str,
    limits: ExecutorLimits,
    key: bytes,
    status_endpoint: str,
    status_curve_key: str,
    leader_endpoint: str,
    lane: LaneSpec | None,
) -> list[Orders]:
    """One for each rank, from the owner's own process and thread."""
    bounds = RankBounds(
        heartbeat_s=limits.heartbeat_s,
        owner_silence_s_max=limits.health.give_up_s,
        hello_s_max=limits.hello_s_max,
        leave_s_max=limits.stop_live_s_max + limits.stop_dead_s_max,
        queue_messages_max=limits.queue_messages_max,
        message_bytes_max=limits.message_bytes_max,
        tombstones_max=limits.tombstones_max,
    )
    num_ranks = config.executor.world.num_ranks
    first = Orders(
        config=config,
        name=name,
        rank=0,
        num_ranks=num_ranks,
        key=key,
        status_endpoint=status_endpoint,
        status_curve_key=status_curve_key,
        leader_endpoint=leader_endpoint,
        lane=lane,
        owner=ProcessName.own(),
        bounds=bounds,
        dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
    )
    members = (msgspec.structs.replace(first, rank=i, lane=None) for i in range(1, num_ranks))
    return [first, *members]


def pack_orders(orders: Orders) -> bytes:
    body = msgspec.msgpack.encode(orders)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_orders(stream: BinaryIO) -> Orders:
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(stream.read(length), type=Orders)
