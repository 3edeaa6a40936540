"""Launcher `external`: the ranks are those of an MPI or Slurm job that somebody else started.

The job's processes run our entry (under_mpi.py), which waits for orders; this command runs
beside rank 0, outside of the job: what takes the whole job down leaves the server alive to say
so. Orders go to rank 0 by an inherited socket and from there by MPI. A job serves one world.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

import msgspec

from executor.world.launch import Exit, Launcher
from executor.world.mpi_start import pack_all
from executor.world.orders import Orders, ProcessName
from executor.world.outer import forget_control_descriptor
from executor.world.watch import RankWatch
from protos.errors import ConfigError

LENGTH_BYTES = 8
GREETING_S_MAX = 10.0


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0's process says of itself and of its job."""

    process: ProcessName
    num_ranks: int
    spans_hosts: bool


def send_blob(channel: socket.socket, body: bytes) -> None:
    channel.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)


def receive_blob(channel: socket.socket) -> bytes | None:
    """None where the other side has closed, or a timeout of the channel's has passed."""
    head = _receive(channel, LENGTH_BYTES)
    return None if head is None else _receive(channel, int.from_bytes(head, "little"))


def _receive(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = b""
    while len(data) < num_bytes:
        try:
            piece = channel.recv(num_bytes - len(data))
        except (ConnectionResetError, TimeoutError):
            return None
        if not piece:
            return None
        data += piece
    return data


class ExternalLauncher(Launcher):
    """Its ranks' log goes where the job's output goes; their processes outlive the world."""

    name = "external"
    ranks_end = False

    def __init__(self, descriptor: int) -> None:
        forget_control_descriptor()
        self._channel = socket.socket(fileno=descriptor)
        self._channel.set_inheritable(False)
        self._channel.settimeout(GREETING_S_MAX)
        greeting = receive_blob(self._channel)
        if greeting is None:
            raise ConfigError(
                f"the outer MPI job has ended, or said nothing for {GREETING_S_MAX:g} s",
                field="world.launcher",
            )
        self._greeting = msgspec.msgpack.decode(greeting, type=Greeting)
        self.spans_hosts = self._greeting.spans_hosts
        self._watch: RankWatch | None = None

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._watch = RankWatch(0, self._greeting.process, loop, on_exit)
        told = [msgspec.structs.replace(order, dies_with_parent_thread=False) for order in orders]
        try:
            send_blob(self._channel, pack_all(told))
        except OSError as error:
            raise ConfigError(
                f"the outer MPI job does not take orders: {error}", field="world.launcher"
            ) from None

    def exits(self) -> tuple[Exit, ...]:
        watch = self._watch
        return (Exit(0, watch.words),) if watch is not None and watch.has_exited() else ()

    def kill(self) -> None:
        """MPI then ends the other ranks."""
        if self._watch is not None:
            self._watch.kill()

    @property
    def log_lines(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self._channel.close()
        if self._watch is not None:
            self._watch.close()
