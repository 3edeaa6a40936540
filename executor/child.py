"""A worker as a child process: spawned plainly, its log lines kept, its end awaited.

Life: spawned (bootstrap goes down its standard input, which then stays open as
our sign of life: no process that is forked from us has it), running, exited (seen
by the monitor), reaped and closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping

from executor.forks import keep_from_forks, no_forks
from executor.limits import ExecutorLimits
from executor.monitor import ProcessMonitor

logger = logging.getLogger("executor.worker")
READ_BYTES = 1 << 16


class LogTail:
    """Reads the worker's output pipe on the event loop; keeps the last lines, echoes all."""

    def __init__(
        self, descriptor: int, loop: asyncio.AbstractEventLoop, limits: ExecutorLimits, name: str
    ) -> None:
        self._descriptor = descriptor
        self._loop = loop
        self._line_bytes_max = limits.log_line_bytes_max
        self._name = name
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=limits.log_lines_max)
        os.set_blocking(descriptor, False)
        loop.add_reader(descriptor, self._on_readable)

    def fileno(self) -> int:
        """Negative once it is closed."""
        return self._descriptor

    def close(self) -> None:
        """Read what is still there. Idempotent."""
        while self._descriptor >= 0 and self._on_readable():
            pass
        self._stop()

    def _on_readable(self) -> bool:
        """False where nothing more is there now."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._stop()
            return False
        self._feed(data)
        return True

    def _feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._line_bytes_max:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        text = line[: self._line_bytes_max].decode(errors="replace").rstrip()
        if text:
            self.lines.append(text)
            logger.info("%s: %s", self._name, text)

    def _stop(self) -> None:
        if self._descriptor >= 0:
            self._keep(self._rest)
            self._rest = b""
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class WorkerChild:
    """`on_exit` is called once, on the event loop."""

    def __init__(
        self,
        bootstrap: bytes,
        *,
        name: str,
        limits: ExecutorLimits,
        on_exit: Callable[[], None],
        module: str,
        kind: str,
        environment: Mapping[str, str] | None = None,
        leads_group: bool = False,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        """`module` is run; `kind` is what the process is called in words. `leads_group`: it
        starts a process group of its own. It inherits `pass_fds`."""
        loop = asyncio.get_running_loop()
        with no_forks():
            read_end, write_end = os.pipe()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    env={**child_environment(), **(environment or {})},
                    process_group=0 if leads_group else None,
                    stdin=subprocess.PIPE,
                    stdout=write_end,
                    stderr=write_end,
                    pass_fds=pass_fds,
                )
            except BaseException:
                os.close(read_end)
                raise
            finally:
                os.close(write_end)
            self._log = LogTail(read_end, loop, limits, name)
            assert self._process.stdin is not None
            keep_from_forks(self._process.stdin)
            keep_from_forks(self._log)
        self.exited = asyncio.Event()
        self._on_exit = on_exit
        self._kind = kind
        self._monitor = ProcessMonitor(self._process.pid, loop, self._exit_seen)
        try:
            self._process.stdin.write(bootstrap)
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.warning("%s: the %s ended before it was told anything", name, kind)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_lines(self) -> tuple[str, ...]:
        return tuple(self._log.lines)

    def has_exited(self) -> bool:
        return self._monitor.has_exited()

    def kill(self) -> None:
        """Harmless where it has ended."""
        self._process.kill()

    def describe_exit(self) -> str:
        """How it ended, in words; reads the rest of its log first."""
        self._log.close()
        status = self._process.wait()  # it has exited: this only reaps
        if status < 0:
            name = signal.Signals(-status).name
            return f"the {self._kind} (process {self.pid}) was killed by {name}"
        return f"the {self._kind} (process {self.pid}) exited with status {status}"

    def end_input(self) -> None:
        """The sign of life that it watches ends. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                logger.debug("the worker's standard input was closed from its side")

    def close(self) -> None:
        """Free descriptors; reaps where the process has ended. Idempotent."""
        self._monitor.close()
        self._log.close()
        self.end_input()
        self._process.poll()

    def _exit_seen(self) -> None:
        self._process.poll()
        self.exited.set()
        self._on_exit()


def child_environment() -> dict[str, str]:
    """Ours, with our import path, so that the child finds the same packages; an empty entry of
    that means the folder."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
