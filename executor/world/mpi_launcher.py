"""`python -m executor.world.mpi_launcher`: the small process that spawns a world's ranks by MPI.

MPICH takes down whoever spawned a rank that is killed, together with its process group. So
the owner of the world is never that process: this one is. Once the ranks run it leaves that
group, waits for the end of either side and reaps what is left. Orders come by standard input,
which then stays open as the owner's sign of life.

Exit status: 0 the owner asked for the end, 1 the ranks could not be started, 2 MPI ended them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

from executor.parent import die_with_parent
from executor.world.mpi_start import broadcast, forget_shared_memory, load_mpi, read_all
from protos.errors import BatonError

PR_SET_CHILD_SUBREAPER = 36
REAP_S_MAX = 3.0
EXIT_NOT_STARTED, EXIT_ENDED = 1, 2
LENGTH_BYTES = 8


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "little")
    data = sys.stdin.buffer.read(length)
    orders = read_all(data)
    if orders[0].dies_with_parent_thread:
        die_with_parent(orders[0].owner.pid)
    try:
        spawn(data, len(orders))
    except BatonError as error:
        print(f"ERROR {error.message}", file=sys.stderr)  # noqa: T201 - the owner's to show
        return EXIT_NOT_STARTED
    _leave_group()
    status = _wait_for_either_end()
    _kill_group()
    _reap()
    return status


def spawn(data: bytes, num_ranks: int) -> None:
    MPI = load_mpi()  # noqa: N806 - the module's own name
    forget_shared_memory()
    ranks = MPI.COMM_SELF.Spawn(
        sys.executable,
        args=["-P", "-m", "executor.world.mpi_rank"],
        maxprocs=num_ranks,
    )
    broadcast(ranks, data, root=MPI.ROOT)


def _leave_group() -> None:
    """MPICH's own process stays in the group that we were started as, and kills that one."""
    with contextlib.suppress(OSError):  # another session's parent: then we go with the group
        os.setpgid(0, os.getpgid(os.getppid()))


def _wait_for_either_end() -> int:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        if _has_no_child():
            return EXIT_ENDED
        ready, _, _ = select.select([0, reads], [], [])
        if 0 in ready and not os.read(0, 4096):
            return 0
        if reads in ready:
            os.read(reads, 4096)


def _has_no_child() -> bool:
    """Reaps whoever ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return False
    return True


def _kill_group() -> None:
    """Our old group's number is our own pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(0) != os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)


def _reap() -> None:
    ends_at_s = time.monotonic() + REAP_S_MAX
    while not _has_no_child() and time.monotonic() < ends_at_s:
        time.sleep(0.01)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
