"""Watches one rank's process on this host by the pid of its HELLO, whoever is its parent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor.monitor import ProcessMonitor
from executor.world.orders import ProcessName, start_ticks


class RankWatch:
    """`on_exit` is called once, on the event loop; soon, where the process is gone already."""

    def __init__(
        self,
        rank: int,
        process: ProcessName,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[], None],
    ) -> None:
        self.rank = rank
        self._process = process
        self._was_told = False
        self._monitor: ProcessMonitor | None = None
        try:
            monitor = ProcessMonitor(process.pid, loop, on_exit)
        except ProcessLookupError:
            loop.call_soon(on_exit)
            return
        if self._is_it():
            self._monitor = monitor
        else:
            monitor.close()
            loop.call_soon(on_exit)

    @property
    def words(self) -> str:
        return f"the worker of rank {self.rank} (process {self._process.pid}) is gone"

    def has_exited(self) -> bool:
        return self._monitor is None or self._monitor.has_exited()

    def is_news(self) -> bool:
        """True once, after it ended."""
        is_news = not self._was_told and self.has_exited()
        self._was_told = self._was_told or is_news
        return is_news

    def kill(self) -> None:
        if self._monitor is not None:
            self._monitor.kill()

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()

    def _is_it(self) -> bool:
        try:
            return start_ticks(self._process.pid) == self._process.start_ticks
        except OSError:
            return False
