"""What an executor must leave behind: nothing. Snapshots of this process before and after."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

SETTLE_S_MAX = 5.0


@dataclass(frozen=True)
class Baseline:
    descriptors: Counter[str]
    num_threads: int
    children: tuple[int, ...]
    ipc_folders: tuple[str, ...]

    @classmethod
    def take(cls) -> Baseline:
        gc.collect()
        process = psutil.Process()
        return cls(
            descriptors=_descriptors(),
            num_threads=len(os.listdir("/proc/self/task")),
            children=tuple(sorted(child.pid for child in process.children(recursive=True))),
            ipc_folders=tuple(sorted(_own_ipc_folders())),
        )

    def excess_over(self, before: Baseline) -> str:
        """Empty where nothing was left."""
        left = {
            "descriptors": dict(self.descriptors - before.descriptors),
            "threads": max(self.num_threads - before.num_threads, 0),
            "children": [pid for pid in self.children if pid not in before.children],
            "ipc folders": [f for f in self.ipc_folders if f not in before.ipc_folders],
        }
        return "; ".join(f"{what}: {value}" for what, value in left.items() if value)


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return kinds


def _own_ipc_folders() -> Iterator[str]:
    """Those that name our process: other tests' folders come and go beside us."""
    for folder in Path(tempfile.gettempdir()).glob(f"baton-ipc-{os.getpid()}-*"):
        yield str(folder)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails where descriptors, threads, children or socket folders outlive the block."""
    before = Baseline.take()
    yield
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while (excess := Baseline.take().excess_over(before)) and time.monotonic() < ends_at_s:
        time.sleep(0.02)
    assert not excess, f"left behind: {excess}"
