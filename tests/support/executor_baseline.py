"""What an executor must leave behind: nothing. Snapshots of this process before and after.

Processes are found as our descendants, and by a mark in the environment that they inherit: a
parent that is killed (Ray's, MPI's) leaves its own to init. Files are found by a TMPDIR of our
own, which they inherit as well: what lies there is ours, whoever of us made it and is dead by
now. Shared memory has one place for all of this machine: a file there counts once nobody that
lives has it mapped or open, unless it was a stranger's when it was last looked at; MPI's files as
well. A Ray cluster that the test session runs is set aside, but for what a world has started in it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import glob
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from common.scratch import _lock, sweep

SETTLE_S_MAX = 5.0
MARK = "BATON_TEST_MARK"
RUN = "BATON_TEST_RUN"
"""The mark of the whole run, of which a part may have a mark of its own."""
SHARED = ("/dev/shm/*", "/tmp/hydra_hwloc_xmlfile_*")
SCRATCH = "baton-*"
SHARED_TMP = Path(tempfile.gettempdir())
"""Where short paths lie, and whatever else is not told of our own folder."""
OWN_TMP, SHORT_TMP = "bt-", Path("/tmp")
"""Ray's sockets lie deep in it, and their paths must not be long."""
LOOK_EVERY_S = 0.05
CLUSTERS: set[int] = set()
"""Processes at the roots of clusters that the session runs."""
PYTHONS_OWN = "from multiprocessing.resource_tracker import"
"""A process that tests start by `multiprocessing` has this one started, for good."""
OURS_IN_A_CLUSTER = ("executor.", "RankAgent")
STRANGERS: set[str] = set()
"""Shared memory that processes of no part of this run were seen to hold."""


def mark_anew() -> None:
    """What starts from here on is this process's, and nobody else's."""
    os.environ[MARK] = secrets.token_hex(16)
    os.environ.setdefault(RUN, os.environ[MARK])
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_TMP))  # kept for whoever reads it
    sweep(OWN_TMP, SHORT_TMP)
    folder = tempfile.mkdtemp(prefix=OWN_TMP, dir=SHORT_TMP)
    _lock(Path(folder))  # until we end: what a killed run leaves is swept by the next
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


if MARK not in os.environ:
    mark_anew()


@dataclass(frozen=True)
class Baseline:
    descriptors: Counter[str]
    num_threads: int
    processes: tuple[str, ...]
    folders: tuple[str, ...]
    shared_memory: tuple[str, ...]

    @classmethod
    def take(cls) -> Baseline:
        gc.collect()
        return cls(
            descriptors=_descriptors(),
            num_threads=len(os.listdir("/proc/self/task")),
            processes=tuple(sorted(_own_processes())),
            folders=tuple(sorted(_own_folders())),
            shared_memory=tuple(sorted(_shared_memory())),
        )

    def excess_over(self, before: Baseline, *, inside: bool = True) -> str:
        """Empty where nothing was left. `inside`: this process's own descriptors and threads too;
        a client's library has some for good."""
        strange = STRANGERS.union(before.shared_memory)
        shared_memory = [name for name in self.shared_memory if name not in strange]
        left = {
            "descriptors": dict(self.descriptors - before.descriptors) if inside else {},
            "threads": max(self.num_threads - before.num_threads, 0) if inside else 0,
            "processes": [each for each in self.processes if each not in before.processes],
            "folders": [folder for folder in self.folders if folder not in before.folders],
            "shared memory": _unmapped(shared_memory),
        }
        return "; ".join(f"{what}: {value}" for what, value in left.items() if value)


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return kinds


def _own_processes() -> Iterator[str]:
    """Pid and command. Zombies of another parent are that one's to reap."""
    me = psutil.Process()
    descendants = {process.pid for process in me.children(recursive=True)}
    mark = f"{MARK}={os.environ[MARK]}".encode()
    in_clusters = {pid for root in CLUSTERS for pid in _tree(root)}
    for pid in sorted(descendants | _marked(mark) - {me.pid}):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())[:200]
            if pid not in descendants and process.status() == psutil.STATUS_ZOMBIE:
                continue
            if PYTHONS_OWN in command:
                continue
            if pid not in in_clusters or any(word in command for word in OURS_IN_A_CLUSTER):
                yield f"{pid} {command}"


def _tree(root: int) -> Iterator[int]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(root)
        yield root
        yield from (child.pid for child in process.children(recursive=True))


def _marked(mark: bytes) -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.add(int(name))
    return found


def _own_folders() -> Iterator[str]:
    """All that lies in our own TMPDIR; elsewhere those that name our process, since other runs'
    come and go beside us."""
    own = Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else SHARED_TMP
    if own != SHARED_TMP:
        yield from map(str, own.glob(SCRATCH))
    yield from map(str, SHARED_TMP.glob(f"baton-*-{os.getpid()}-*"))


def _shared_memory() -> Iterator[str]:
    for pattern in SHARED:
        yield from glob.glob(pattern)


def _unmapped(names: list[str]) -> list[str]:
    """Those that no process has mapped or open: nobody is going to remove them.
    Looked for before the maps are read: one may be made, mapped and removed meanwhile."""
    held = _holders(names)
    return [name for name in names if not held[name] and os.path.exists(name)]


def _holders(names: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in names}
    for process in Path("/proc").glob("[0-9]*") if names else ():
        held = ""
        with contextlib.suppress(OSError):
            held += (process / "maps").read_text()
        for path in process.glob("fd/*"):
            with contextlib.suppress(OSError):
                held += f"{os.readlink(path)}\n"
        for name in names:
            if name in held:
                found[name].append(int(process.name))
    return found


class _Onlooker(threading.Thread):
    """Sees who holds a new file of shared memory: once its holder is dead nobody knows."""

    def __init__(self) -> None:
        super().__init__(name="onlooker", daemon=True)
        self._known = set(_shared_memory())
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            fresh = [name for name in _shared_memory() if name not in self._known]
            ours = _marked(f"{RUN}={os.environ[RUN]}".encode()) if fresh else set()
            for name, holders in _holders(fresh).items():
                if holders:
                    self._known.add(name)
                    if not ours.union([os.getpid()]).intersection(holders):
                        STRANGERS.add(name)

    def end(self) -> None:
        self._is_over.set()
        self.join()


def nothing_of(pids: set[int], before: Baseline) -> None:
    """Fails where processes that have ended left folders of their names, or anybody has left
    shared memory since."""
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while True:
        folders = [str(path) for pid in pids for path in _folders_of(pid)]
        fresh = STRANGERS.union(before.shared_memory)
        memory = _unmapped([name for name in _shared_memory() if name not in fresh])
        if not (folders or memory) or time.monotonic() > ends_at_s:
            break
        time.sleep(0.02)
    assert not folders, f"left behind: folders: {folders}"
    assert not memory, f"left behind: shared memory: {memory}"


def _folders_of(pid: int) -> Iterator[Path]:
    for parent in (Path(tempfile.gettempdir()), SHARED_TMP):
        yield from parent.glob(f"baton-*-{pid}-*")


LAZY_THREADS = ("control",)
"""Of an engine in this process: each starts when it is first needed, and ends with the engine."""


@contextlib.asynccontextmanager
async def nothing_more() -> AsyncIterator[None]:
    """The same for a block on a loop, and an executor, that go on: what is settling there has its
    turns."""
    before, lazy = Baseline.take(), _num_lazy_threads()
    yield
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while True:
        spared = replace(before, num_threads=before.num_threads + _num_lazy_threads() - lazy)
        excess = Baseline.take().excess_over(spared)
        if not excess or time.monotonic() > ends_at_s:
            break
        await asyncio.sleep(0.02)
    assert not excess, f"left behind: {excess}"


def _num_lazy_threads() -> int:
    return sum(thread.name in LAZY_THREADS for thread in threading.enumerate())


@contextlib.contextmanager
def nothing_left(*, inside: bool = True) -> Iterator[None]:
    """Fails where descriptors, threads (both where `inside`), processes, folders or shared memory
    outlive the block."""
    before, onlooker = Baseline.take(), _Onlooker()
    onlooker.start()
    try:
        yield
    finally:
        onlooker.end()
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while (excess := Baseline.take().excess_over(before, inside=inside)) and (
        time.monotonic() < ends_at_s
    ):
        time.sleep(0.02)
    assert not excess, f"left behind: {excess}"
