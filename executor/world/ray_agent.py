"""The Ray actor: an agent on its node that starts one rank as a child process and watches it.

The engine runs in the child and not in the actor, so that Ray's threads, signal handlers and
libraries stay out of the rank, and UCX, the GIL and an engine's crash stay out of Ray. The
child ends with the actor, by the kernel's parent-death signal and its standard input's end.

Life: made by Ray, `start`, then `news` again and again until it says how the rank ended. Ray
calls the methods on threads of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import IO, NamedTuple

from executor.parent import die_with_parent

NEWS_S_MAX = 5.0
"""`news` returns empty-handed after so long, which shows that the actor lives."""
LAST_LINES_S_MAX = 0.3
"""A process that the rank has left behind may hold its output open."""
LINES_MAX = 1000
LINE_BYTES_MAX = 4096


class News(NamedTuple):
    lines: tuple[str, ...]
    end: str
    """How the rank ended, in words; empty while it runs."""
    is_clean: bool
    """Whether it ended well."""


class RankAgent:
    def __init__(self) -> None:
        die_with_parent(os.getppid())  # of a node that is gone, Ray notices it seconds later
        self._condition = threading.Condition()
        self._lines: list[str] = []
        self._end = ""
        self._is_clean = False

    def start(self, module: str, orders: bytes, kind: str) -> int:
        """Run the module with these orders, packed, on its standard input; its pid."""
        pid: Future[int] = Future()
        threading.Thread(target=self._run, args=(module, orders, kind, pid), daemon=True).start()
        return pid.result()

    def news(self) -> News:
        """What the rank has printed since the last call, and how it ended, once it did."""
        with self._condition:
            self._condition.wait_for(lambda: self._lines or self._end, NEWS_S_MAX)
            lines, self._lines = tuple(self._lines), []
            return News(lines, self._end, self._is_clean)

    def _run(self, module: str, orders: bytes, kind: str, pid: Future[int]) -> None:
        """Spawned and awaited on one thread: the kernel kills the rank when that one ends."""
        try:
            process = _spawn(module, orders)
        except OSError as error:
            pid.set_exception(error)
            return
        pid.set_result(process.pid)
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        status = process.wait()
        reader.join(LAST_LINES_S_MAX)
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        with self._condition:
            self._end, self._is_clean = f"the {kind} (process {process.pid}) {how}", status == 0
            self._condition.notify_all()

    def _read(self, output: IO[bytes]) -> None:
        while line := output.readline(LINE_BYTES_MAX):
            text = line.decode(errors="replace").rstrip()
            with self._condition:
                if text and len(self._lines) < LINES_MAX:
                    self._lines.append(text)
                    self._condition.notify_all()


def _spawn(module: str, orders: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # how it ended is told by `news`
        process.stdin.write(orders)
        process.stdin.flush()
    return process
