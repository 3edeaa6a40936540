"""What an executor must leave behind: nothing. Snapshots of this process before and after.

Processes are found as our descendants, and by a mark in the environment that they inherit: a
parent that is killed (Ray's, MPI's) leaves its own to init. Shared memory and MPI's files count
once nobody that lives has them mapped or open. A Ray cluster that the test session runs is set
aside, but for what a world has started in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import glob
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

SETTLE_S_MAX = 5.0
MARK = "BATON_TEST_MARK"
SHARED = ("/dev/shm/*", "/tmp/hydra_hwloc_xmlfile_*")
SCRATCH = ("baton-ipc-", "baton-ray-")
CLUSTERS: set[int] = set()
"""Processes at the roots of clusters that the session runs."""
OURS_IN_A_CLUSTER = ("executor.", "RankAgent")

os.environ.setdefault(MARK, secrets.token_hex(16))


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

    def excess_over(self, before: Baseline) -> str:
        """Empty where nothing was left."""
        shared_memory = [n for n in self.shared_memory if n not in before.shared_memory]
        left = {
            "descriptors": dict(self.descriptors - before.descriptors),
            "threads": max(self.num_threads - before.num_threads, 0),
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
    """Those that name our process: other tests' folders come and go beside us."""
    for prefix in SCRATCH:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}{os.getpid()}-*"):
            yield str(folder)


def _shared_memory() -> Iterator[str]:
    for pattern in SHARED:
        yield from glob.glob(pattern)


def _unmapped(names: list[str]) -> list[str]:
    """Those that no process has mapped or open: nobody is going to remove them.
    Looked for before the maps are read: one may be made, mapped and removed meanwhile."""
    if not names:
        return []
    held = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held += path.read_text()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            held += f"{os.readlink(path)}\n"
    return [name for name in names if name not in held and os.path.exists(name)]


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
def nothing_left() -> Iterator[None]:
    """Fails where descriptors, threads, processes, folders or shared memory outlive the block."""
    before = Baseline.take()
    yield
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while (excess := Baseline.take().excess_over(before)) and time.monotonic() < ends_at_s:
        time.sleep(0.02)
    assert not excess, f"left behind: {excess}"
