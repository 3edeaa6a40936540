"""Sees a process end by its full name, pid and start time, where that process is on this host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor.monitor import ProcessMonitor
from executor.world.orders import ProcessName, start_ticks


class ProcessWatch:
    """`on_exit` is called once, on the event loop; soon, where the process is gone already.
    A process of another host is never seen to end."""

    def __init__(
        self,
        process: ProcessName,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[], None],
    ) -> None:
        self.is_here = process.is_here()
        self._monitor: ProcessMonitor | None = None
        if not self.is_here:
            return
        try:
            monitor = ProcessMonitor(process.pid, loop, on_exit)
        except ProcessLookupError:
            loop.call_soon(on_exit)
            return
        # Looked at after the pidfd is open: whoever has the pid now cannot change any more.
        if _is_it(process):
            self._monitor = monitor
        else:
            monitor.close()
            loop.call_soon(on_exit)

    def has_exited(self) -> bool:
        """Looks now, without waiting for the event loop's turn."""
        return self.is_here and (self._monitor is None or self._monitor.has_exited())

    def close(self) -> None:
        """Idempotent."""
        if self._monitor is not None:
            self._monitor.close()


def _is_it(process: ProcessName) -> bool:
    try:
        return start_ticks(process.pid) == process.start_ticks
    except OSError:
        return False
