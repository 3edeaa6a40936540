"""`python -m executor.world.mpi_launcher`: the small process that spawns a world's ranks by MPI.

MPICH takes down whoever spawned a rank that is killed, together with its process group. So
the owner of the world is never that process: this one is. Once the ranks run it leaves that
group and waits for the end of either side. Orders come by standard input, which then stays
open as the owner's sign of life; its end is seen in every phase, also while MPI is busy.

MPI's own helpers (mpiexec, its proxies) are watched too: where one of them is killed, ranks
and a spawn under way may wait for it for ever. Then all of it ends.

Whatever MPI starts stays below this process, which adopts orphans: at the end it kills and
reaps all of it, and removes the shared memory of ranks that were cut off before they could.

Exit status: 0 the owner asked for the end, 1 the ranks could not be started, 2 MPI ended them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from executor.last_words import end
from executor.world.mpi_start import (
    broadcast,
    forget_shared_memory,
    load_mpi,
    mapped_by,
    opened_by,
    read_all,
)
from protos.errors import BatonError

PR_SET_CHILD_SUBREAPER = 36
REAP_S_MAX = 2.0
EXIT_ASKED, EXIT_NOT_STARTED, EXIT_ENDED = 0, 1, 2
LENGTH_BYTES = 8
HELPERS = ("mpiexec", "mpirun", "hydra_pmi_proxy", "prte", "orted")
LOOKS_EVERY_S = 0.2
ORDERLY_S_MAX = 0.5
"""After an orderly end helpers end one by one, and then we do."""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "little")
    data = sys.stdin.buffer.read(length)
    threading.Thread(target=_end_with_owner, name="owner-watch", daemon=True).start()
    threading.Thread(target=_end_with_helpers, name="helper-watch", daemon=True).start()
    try:
        spawn(data, len(read_all(data)))
    except BatonError as error:
        print(f"ERROR {error.message}", file=sys.stderr)  # noqa: T201 - the owner's to show
        return EXIT_NOT_STARTED
    _leave_group()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return EXIT_ENDED


def spawn(data: bytes, num_ranks: int) -> None:
    MPI = load_mpi()  # noqa: N806 - the module's own name
    forget_shared_memory()
    ranks = MPI.COMM_SELF.Spawn(
        sys.executable,
        args=["-P", "-m", "executor.world.mpi_rank"],
        maxprocs=num_ranks,
    )
    broadcast(ranks, data, root=MPI.ROOT)
    for pid in _descendants(os.getpid()):
        for file in opened_by(pid):
            Path(file).unlink(missing_ok=True)


def _leave_group() -> None:
    """MPICH's own process stays in the group that we were started as, and kills that one."""
    with contextlib.suppress(OSError):  # another session's parent: then we go with the group
        os.setpgid(0, os.getpgid(os.getppid()))


def _end_with_owner() -> None:
    while os.read(0, 4096):
        pass
    _end_descendants({})
    forget_shared_memory()
    end(EXIT_ASKED)


def _end_with_helpers() -> None:
    seen: dict[int, str] = {}
    files: dict[str, None] = {}
    while not (lost := _lost(seen)):
        files = {file: None for pid in seen for file in opened_by(pid)} or files
        time.sleep(LOOKS_EVERY_S)
    time.sleep(ORDERLY_S_MAX)
    print(f"ERROR MPI's {seen[lost]} (process {lost}) is gone", file=sys.stderr)  # noqa: T201
    _end_descendants(files)
    forget_shared_memory()
    end(EXIT_ENDED)


def _lost(seen: dict[int, str]) -> int:
    """The first helper that was seen and has ended; 0 where there is none."""
    living = {pid: name for pid in _descendants(os.getpid()) if (name := _helper(pid))}
    seen |= living
    return next((pid for pid in seen if pid not in living), 0)


def _helper(pid: int) -> str:
    """Its name; empty for a rank, and for what has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    name, state = stat.partition("(")[2].rpartition(")")[::2]
    return name if name.startswith(HELPERS) and state.split()[0] != "Z" else ""


def _end_descendants(files: dict[str, None]) -> None:
    """Stopped first, so that none starts another one or maps another file meanwhile. `files`
    are removed as well."""
    ends_at_s = time.monotonic() + REAP_S_MAX
    while (pids := _descendants(os.getpid())) and time.monotonic() < ends_at_s:
        _signal_all(pids, signal.SIGSTOP)
        for pid in pids:
            files |= dict.fromkeys([*mapped_by(pid), *opened_by(pid)])
        _signal_all(pids, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
    for file in files:
        Path(file).unlink(missing_ok=True)


def _descendants(pid: int) -> list[int]:
    """Living ones and zombies, parents first."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    end(main())
