"""Worlds of several ranks over the scripted engine, and what they may not leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from executor.config import EngineConfig, ExecutorConfig, WorldConfig
from tests.support.executor_scripted import config

SETTLE_S_MAX = 5.0


def ranked(launcher: str, num_ranks: int, **script: Any) -> EngineConfig:
    world = msgspec.convert({"launcher": launcher, "num_ranks": num_ranks}, WorldConfig)
    return msgspec.structs.replace(config(**script), executor=ExecutorConfig(world=world))


def is_gone(pid: int) -> bool:
    """Ended; a zombie that its own parent has yet to reap counts."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def all_gone(pids: Sequence[int]) -> bool:
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while not all(map(is_gone, pids)):
        if time.monotonic() > ends_at_s:
            return False
        time.sleep(0.02)
    return True


def _mpi_files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("mpich_shm_*")}


@contextlib.contextmanager
def no_mpi_files() -> Iterator[None]:
    """Fails where a world leaves MPICH's shared memory behind. Another job's files may go."""
    before = _mpi_files()
    yield
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while (left := _mpi_files() - before) and time.monotonic() < ends_at_s:
        time.sleep(0.02)
    assert not left, f"left behind: {sorted(left)} (we are {os.getpid()})"
