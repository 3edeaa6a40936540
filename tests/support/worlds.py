"""Worlds of several ranks over the scripted engine, and whether their processes are gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
