"""`python -m executor.worker_main`: the worker process, as the proxy spawns it.

It reads its `Bootstrap` from standard input and takes that descriptor's end for
its parent's end. SIGINT is the whole terminal group's and therefore the
parent's to judge; SIGTERM stops the worker cleanly. Exit status: 0 stopped, 1
the engine died or did not load, 3 the parent vanished.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from executor.engine.factory import create_engine
from executor.engine.seam import Engine
from executor.inbox import Inbox
from executor.lane import OWNER_ID
from executor.lanes import Lanes
from executor.messages import Bootstrap, Died, Hello, read_bootstrap
from executor.worker import Heart, Worker
from protos.errors import BatonError, ConfigError, InternalError

PR_SET_PDEATHSIG = 1
EXIT_DIED = 1
EXIT_PARENT_GONE = 3


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    bootstrap = read_bootstrap(sys.stdin.buffer)
    if bootstrap.dies_with_parent_thread:
        _die_with_parent(bootstrap.parent_pid)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    return WorkerProcess(bootstrap).run()


def start_ticks(pid: int) -> int:
    """The process's start time, which with its pid names it for ever."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


class WorkerProcess:
    """Sockets, signals and exit status around `Worker`."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._stopping = threading.Event()
        self._is_loaded = False
        self._inbox = Inbox(bootstrap.queue_messages_max)
        self._lanes = Lanes(
            self._inbox,
            clock=time.monotonic,
            is_stopping=self._stopping.is_set,
            queue_messages_max=bootstrap.queue_messages_max,
            message_bytes_max=bootstrap.message_bytes_max,
        )
        self._lanes.open(bootstrap.lane)
        self._thread: threading.Thread | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self) -> int:
        """The exit status. Threads and sockets that still wait end with the process."""
        pid = os.getpid()
        self._lanes.say(OWNER_ID, Hello(pid, start_ticks(pid), socket.gethostname()))
        status = EXIT_DIED
        try:
            engine = create_engine(self._bootstrap.config, self._inbox.wake)
        except Exception as error:
            self._say_died(error)
        else:
            self._is_loaded = True
            status = self._serve(engine)
        self._close()
        return status

    def _say_died(self, error: Exception) -> None:
        """Before anything is closed: closing a broken engine may take its time."""
        if isinstance(error, ConfigError):
            print(f"ERROR {error.message}", file=sys.stderr)  # noqa: T201 - the user's to mend
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        self._lanes.say_all(Died(_to_baton(error).to_data()))

    def _close(self) -> None:
        """Let the last words out: bounded by the sockets' linger."""
        self._inbox.stop()  # frees a receiver that waits for room
        self._lanes.shut(has_receiver=self._thread is not None)

    def _serve(self, engine: Engine) -> int:
        bootstrap = self._bootstrap
        worker = Worker(engine, self._inbox, self._lanes, tombstones_max=bootstrap.tombstones_max)
        self._thread = threading.Thread(
            target=self._lanes.receive_until_closed, name="receiver", daemon=True
        )
        self._thread.start()
        heart = Heart(worker, self._lanes, bootstrap.heartbeat_s)
        heart.start()
        status = 0
        try:
            worker.run()
        except Exception as error:
            self._say_died(error)
            status = EXIT_DIED
        heart.stop()
        engine.close()
        return status

    def _on_sigterm(self, *_: Any) -> None:
        self._stopping.set()
        if not self._is_loaded:
            os._exit(0)  # nothing of ours is worth closing before the engine stands
        # Not here: the interrupted main thread may hold the inbox's lock.
        threading.Thread(target=self._inbox.stop, daemon=True).start()


def _to_baton(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the signal was armed
        os._exit(EXIT_PARENT_GONE)


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread may keep a finished worker alive
