"""`mpirun -n 2 python -m executor.world.under_mpi baton context ...`: our entry in an outer job.

Every process of the job is a rank and waits for its orders. Beside rank 0 the command runs, in
a session of its own and outside of MPI: its executor finds the way to rank 0, which passes
the orders on. The job ends with the command: with its status, or at once where a rank fails.

A rank ends with the process that started it (hydra's proxy): mpirun does not notice the loss of
that one, and would no longer reach the ranks. The command hears of it as of any rank's death.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from executor.last_words import end
from executor.parent import EXIT_PARENT_GONE, watch_parent
from executor.world.external import Greeting, receive_blob, send_blob
from executor.world.mpi_start import (
    broadcast,
    forget_shared_memory,
    load_mpi,
    meet,
    opened_by,
    read_all,
)
from executor.world.orders import ProcessName
from executor.world.outer import ENTRY, command_environment, outer_rank
from executor.world.rank import EXIT_DIED, run_rank
from protos.errors import ConfigError

USAGE = f"usage: mpirun -n RANKS {ENTRY} COMMAND [ARGUMENT ...]"
EXIT_USAGE = 2
LAST_ORDERS_S_MAX = 0.5
"""For what a command that has ended had still sent."""


class Command:
    """What rank 0 runs beside itself; a signal to the rank is passed on to it."""

    def __init__(self, argv: Sequence[str], greeting: Greeting) -> None:
        self.channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=command_environment(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # it has ended already: its status tells
            send_blob(self.channel, msgspec.msgpack.encode(greeting))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def orders(self) -> bytes:
        """Empty where the command ends without a world; children of its own that live on, and
        have inherited its end of the channel, do not count."""
        pidfd = os.pidfd_open(self._process.pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(self.channel, select.POLLIN)
        poller.poll()
        os.close(pidfd)
        if self._process.poll() is not None:
            self.channel.settimeout(LAST_ORDERS_S_MAX)
        return receive_blob(self.channel) or b""

    def wait(self) -> int:
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def main(argv: Sequence[str]) -> int:
    if not argv:
        print(USAGE, file=sys.stderr)  # noqa: T201 - a command's own usage
        return EXIT_USAGE
    watch_parent(_end_with_manager)
    mpi = _mpi()
    if mpi is None:
        return EXIT_USAGE
    job = mpi.COMM_WORLD
    greeting = Greeting(
        process=ProcessName.own(), num_ranks=job.size, spans_hosts=_spans_hosts(mpi)
    )
    meet(job)
    forget_shared_memory()
    for file in opened_by(os.getppid()):  # hydra's own, which it leaves where a rank is killed
        Path(file).unlink(missing_ok=True)
    if job.rank == 0:
        return _lead(mpi, Command(argv, greeting))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # mpirun tells all; the command judges for all
    data = broadcast(job, None, root=0)
    status = run_rank(read_all(data)[job.rank], keeps_signals=True) if data else 0
    return status or _part(mpi, None)


def _end_with_manager() -> None:
    forget_shared_memory()
    os._exit(EXIT_PARENT_GONE)


def _mpi() -> Any | None:
    """None where MPI cannot be had: one line of the job says so."""
    try:
        return load_mpi()
    except ConfigError as error:
        if not outer_rank():
            print(f"{ENTRY}: {error.message}", file=sys.stderr)  # noqa: T201
        return None


def _lead(mpi: Any, command: Command) -> int:
    data = broadcast(mpi.COMM_WORLD, command.orders(), root=0)
    status = run_rank(read_all(data)[0], keeps_signals=True) if data else 0
    if status != 0:
        return status  # MPI ends the others; the command lives on to tell
    return _part(mpi, command.wait())


def _part(mpi: Any, status: int | None) -> int:
    """Leave together, with one status: who leaves MPI alone takes the others down, and mpirun
    tells the status of any of them."""
    told = None if status is None else status.to_bytes(2, "little")
    status = int.from_bytes(broadcast(mpi.COMM_WORLD, told, root=0), "little")
    mpi.Finalize()
    return status


def _spans_hosts(mpi: Any) -> bool:
    here = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    return bool(here.size != mpi.COMM_WORLD.size)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = EXIT_DIED
    end(status)  # not by falling out: MPI's own end would wait for the other ranks
