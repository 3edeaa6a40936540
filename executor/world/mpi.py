"""Launcher `mpi`: a small process of its own spawns the ranks by Comm.Spawn, on this host.

That process removes MPI's files, unless MPI takes it down while ranks still start: then this
one does, at `close`, when nobody has them any more.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from executor.child import WorkerChild
from executor.limits import ExecutorLimits
from executor.world.events import LAUNCHER
from executor.world.launch import Exit, Launcher
from executor.world.mpi_launcher import LENGTH_BYTES
from executor.world.mpi_start import pack_all, unclaimed
from executor.world.orders import Orders
from executor.world.outer import path_with

KILL_AFTER_S = 3.0
"""It is well only where it gets to its own cleaning up; bounded by the world's own bound."""


class MpiLauncher(Launcher):
    name = "mpi"
    has_process = True

    def __init__(self, name: str, limits: ExecutorLimits) -> None:
        self._name = name
        self._limits = limits
        self._child: WorkerChild | None = None
        self._exits: tuple[Exit, ...] = ()
        self._began_s = time.time()  # as files tell their age

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        data = pack_all(list(orders))
        self._child = WorkerChild(
            len(data).to_bytes(LENGTH_BYTES, "little") + data,
            name=self._name,
            limits=self._limits,
            on_exit=on_exit,
            module="executor.world.mpi_launcher",
            kind="MPI launcher",
            environment={"PATH": path_with(str(Path(sys.executable).parent))},  # MPICH's helpers
            leads_group=True,
        )

    def exits(self) -> tuple[Exit, ...]:
        child = self._child
        if not self._exits and child is not None and child.has_exited():
            self._exits = (Exit(LAUNCHER, child.describe_exit()),)
        return self._exits

    def kill(self) -> None:
        """It ends its ranks and reaps them by itself, unless it does not get to it."""
        if self._child is not None:
            self._child.end_input()
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self._child.kill)

    @property
    def log_lines(self) -> tuple[str, ...]:
        return () if self._child is None else self._child.log_lines

    def close(self) -> None:
        if self._child is None:
            return
        self._child.close()
        for file in unclaimed(self._began_s):
            Path(file).unlink(missing_ok=True)
