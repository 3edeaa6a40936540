"""Sees a process end, through its pidfd, in every phase of its life and of ours.

Detection only: what a death means is decided by whoever is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable


class ProcessMonitor:
    """Calls `on_exit` once, on the event loop, soon after the process ended."""

    def __init__(
        self, pid: int, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._pidfd = os.pidfd_open(pid)
        loop.add_reader(self._pidfd, self._on_readable)

    def has_exited(self) -> bool:
        """Looks now, without waiting for the event loop's turn."""
        if self._pidfd < 0:
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def kill(self) -> None:
        """Harmless where it has ended; never another process that took its pid."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_readable(self) -> None:
        self.close()
        self._on_exit()
