"""One process that the launcher started.

    started -> ready (its READY line came) -> exited (its pidfd is readable)

It has a session of its own, so that a Ctrl-C of the terminal reaches the
launcher alone and the launcher can end whatever the process left behind. It is
not reaped before `end_group`: until then its pid cannot become another's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from baton.launch.plan import ProcessPlan
from common.process import EXIT_CONFIG

TAIL_LINES = 12
TAIL_BYTES = 16_384
READY_LINE_BYTES_MAX = 512
KILL_TIMEOUT_S = 5.0


class Child:
    def __init__(
        self, plan: ProcessPlan, config_file: Path, log_file: Path, *, scratch: str
    ) -> None:
        self.name = plan.name
        self.role = plan.role
        self._module = plan.module
        self.address = ""
        """HOST:PORT, once ready."""
        self.log_file = log_file
        self.ready_fd, child_end = os.pipe()
        self._line = b""
        self._exit: os.waitid_result | None = None
        command = [sys.executable, "-m", plan.module, "--config", str(config_file)]
        try:
            with log_file.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, "--ready-fd", str(child_end), "--die-with-parent"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(child_end,),
                    start_new_session=True,
                    env={**os.environ, "TMPDIR": scratch},
                )
        finally:
            os.close(child_end)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def is_ready(self) -> bool:
        return bool(self.address)

    @property
    def has_exited(self) -> bool:
        if self._exit is None and self.pidfd >= 0:
            self._exit = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return self._exit is not None

    def read_ready(self) -> bool:
        """Take what came on `ready_fd`. False where no more can come."""
        piece = os.read(self.ready_fd, READY_LINE_BYTES_MAX)
        self._line += piece
        line, end, _ = self._line.partition(b"\n")
        if end and line.startswith(b"READY "):
            self.address = line.removeprefix(b"READY ").decode(errors="replace").strip()
        return bool(piece) and not end and len(self._line) < READY_LINE_BYTES_MAX

    def terminate(self) -> None:
        """Ask it to stop. Called once: a second request ends our servers without grace."""
        if not self.has_exited:
            self._process.send_signal(signal.SIGTERM)

    def end_group(self) -> bool:
        """Kill it and whatever it left in its session, and reap it. Idempotent.

        False where the kernel does not let go of it.
        """
        if self.pidfd < 0:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        is_dead = bool(select.select([self.pidfd], [], [], KILL_TIMEOUT_S)[0])
        if is_dead:
            self._process.wait()
        os.close(self.pidfd)
        os.close(self.ready_fd)
        self.pidfd = -1
        return is_dead

    def death(self) -> str:
        """How it ended, in words."""
        if self._exit is None:
            return "still runs"
        status = self._exit.si_status
        if self._exit.si_code == os.CLD_EXITED:
            return f"exited with code {status}"
        return f"was killed by {signal.Signals(status).name}"

    def refusal(self) -> str:
        """Its own last words, where it ended because its configuration cannot work; else empty."""
        if self._exit is None or self._exit.si_code != os.CLD_EXITED:
            return ""
        if self._exit.si_status != EXIT_CONFIG:
            return ""
        mark = f"{self._module}: "
        said = [line for line in log_tail(self.log_file) if line.startswith(mark)]
        return said[-1].removeprefix(mark) if said else ""

    def story(self, what: str) -> str:
        """What happened to it, with the last lines it logged."""
        lines = log_tail(self.log_file)
        if not lines:
            return f"{self.name} (pid {self.pid}) {what}; its log {self.log_file} is empty"
        tail = "\n".join(f"  | {line}" for line in lines)
        return f"{self.name} (pid {self.pid}) {what}; last lines of {self.log_file}:\n{tail}"


def log_tail(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-num_lines:]
