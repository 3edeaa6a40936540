"""MPI in a process of ours: libucx first, orders by broadcast, no shared memory file left.

The MPI wheels bundle an older UCX; whichever is loaded first serves the whole process, and the
older one first breaks ours. So every rank passes here before anything else loads MPI.

MPICH leaves its /dev/shm file behind where a job is cut off, and even where it is not. Once
every rank has it mapped nobody needs its name: it is removed then. So does the file by which
hydra tells ranks of the host's hardware, which they have read by then. What is cut off before
that is left to the world's owner: `unclaimed` finds it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from executor.world.orders import Orders
from protos.errors import ConfigError

LENGTH_BYTES = 8
POLL_S = 0.02
HWLOC_PREFIX = "/tmp/hydra_hwloc_xmlfile_"  # noqa: S108 - hydra's name, which we only remove
SHM_PREFIX = "/dev/shm/mpich_shm_"  # noqa: S108 - MPICH's name, which we only remove
PREFIXES = (HWLOC_PREFIX, SHM_PREFIX)
UCX_PREFIX = "/dev/shm/ucx_shm_posix_"  # noqa: S108 - UCX's own, which it has for a moment


def load_mpi() -> Any:
    """mpi4py's MPI module, initialised. Raises ConfigError where it cannot be had."""
    import libucx

    libucx.load_library()
    try:
        from mpi4py import MPI
    except Exception as error:  # no library, or one that does not start here
        raise ConfigError(
            f"MPI cannot be loaded: {error}; run: pip install -e '.[mpi]' in Baton's folder",
            field="world.launcher",
        ) from None
    return MPI


def pack_all(orders: list[Orders]) -> bytes:
    return msgspec.msgpack.encode(orders)


def read_all(data: bytes) -> list[Orders]:
    return msgspec.msgpack.decode(data, type=list[Orders])


def broadcast(communicator: Any, data: bytes | None, root: int) -> bytes:
    """`data` of the root, everywhere. Waits without spinning: the root may take its time."""
    length = bytearray(LENGTH_BYTES) if data is None else len(data).to_bytes(LENGTH_BYTES, "little")
    _wait(communicator.Ibcast(length, root=root))
    body = bytearray(int.from_bytes(length, "little")) if data is None else data
    _wait(communicator.Ibcast(body, root=root))
    return bytes(body)


def meet(communicator: Any) -> None:
    """Until every rank is here. Without spinning."""
    _wait(communicator.Ibarrier())


def forget_shared_memory() -> None:
    """Remove the names of MPICH's files that this process has mapped."""
    for path in mapped_by(os.getpid()):
        Path(path).unlink(missing_ok=True)


def mapped_by(pid: int) -> list[str]:
    """MPICH's files that a process has mapped and that still have a name."""
    return [path for path in _mapped(pid) if path.startswith(SHM_PREFIX) and os.path.exists(path)]


def opened_by(pid: int) -> list[str]:
    """MPICH's and hydra's files that a process has open and that still have a name."""
    return [path for path in _opened(pid) if path.startswith(PREFIXES) and os.path.exists(path)]


def _mapped(pid: int) -> Iterable[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return ()
    return dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines)


def _opened(pid: int) -> list[str]:
    paths: list[str] = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                paths.append(os.readlink(descriptor))
    return paths


def unclaimed(since_s: float) -> list[str]:
    """MPICH's, its UCX's and hydra's files of this user, made since then (by the wall clock),
    that no process of this host has open or mapped."""
    prefixes = (*PREFIXES, UCX_PREFIX)
    names = [name for prefix in prefixes for name in sorted(glob.glob(f"{prefix}*"))]
    born = [name for name in names if _is_own(name, since_s)]
    if not born:
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    claimed = {path for pid in pids for path in (*_opened(pid), *_mapped(pid))}
    return [name for name in born if name not in claimed]


def _is_own(path: str, since_s: float) -> bool:
    try:
        made = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return made.st_uid == os.geteuid() and made.st_mtime >= since_s


def _wait(request: Any) -> None:
    while not request.Test():
        time.sleep(POLL_S)
