"""One frontend as its launcher sees it: started -> ready -> exited (seen by its pidfd), reaped.

It writes to the launcher's own standard error, takes its orders from standard input, tells READY
by a pipe, and is asked to stop by SIGTERM, at the launcher's death too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from executor.child import child_environment
from executor.monitor import ProcessMonitor

READY_BYTES_MAX = 512


class FrontChild:
    """`on_exit` is called once, on the event loop, with this child."""

    def __init__(
        self,
        index: int,
        module: str,
        arguments: Sequence[str],
        orders: bytes,
        *,
        on_ready: Callable[[FrontChild], None],
        on_exit: Callable[[FrontChild], None],
    ) -> None:
        self.index = index
        self._loop = asyncio.get_running_loop()
        self.started_at_s = self._loop.time()
        self.is_ready = False
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._ready_fd, ready_write = os.pipe()
        command = [sys.executable, "-P", "-m", module, *arguments, "--attach-fd", "0"]
        try:
            self._process = subprocess.Popen(
                [*command, "--ready-fd", str(ready_write), "--die-with-parent"],
                env=child_environment(),
                stdin=subprocess.PIPE,
                pass_fds=(ready_write,),
            )
        finally:
            os.close(ready_write)
        self.exited = asyncio.Event()
        self._monitor = ProcessMonitor(self._process.pid, self._loop, self._exit_seen)
        self._loop.add_reader(self._ready_fd, self._read_ready)
        self._tell(orders)

    def _tell(self, orders: bytes) -> None:
        """They fit into the pipe: this does not wait."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(orders)
        except BrokenPipeError:
            pass  # it has ended already, which is seen elsewhere

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """As a shell would tell it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def describe_exit(self) -> str:
        code = self._process.poll()
        if code is None:
            return "still runs"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Idempotent; reaps where the process has ended."""
        self._monitor.close()
        self._process.poll()
        if self._ready_fd >= 0:
            self._loop.remove_reader(self._ready_fd)
            os.close(self._ready_fd)
            self._ready_fd = -1

    def _read_ready(self) -> None:
        is_ready = os.read(self._ready_fd, READY_BYTES_MAX).startswith(b"READY ")
        self._loop.remove_reader(self._ready_fd)
        os.close(self._ready_fd)
        self._ready_fd = -1
        if is_ready:
            self.is_ready = True
            self._on_ready(self)

    def _exit_seen(self) -> None:
        self._process.poll()
        self.exited.set()
        self._on_exit(self)
