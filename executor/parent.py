"""How a child process of ours notices that its parent is gone: two signs, both armed.
A process that somebody else started has a third one: its parent's pidfd.

The kernel's parent-death signal comes at once, but when the *thread* that
spawned us ends, so only a main thread may be trusted with it. The end of the
inherited standard input comes with any end of the parent.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 3


def die_with_parent(parent_pid: int) -> None:
    """By SIGKILL, as soon as the thread that spawned us is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the signal was armed
        os._exit(EXIT_PARENT_GONE)


def watch_standard_input(status: int = EXIT_PARENT_GONE) -> None:
    """Ends this process with `status` when the inherited standard input ends."""
    threading.Thread(target=_watch, args=(status,), name="parent-watch", daemon=True).start()


def _watch(status: int) -> None:
    while os.read(0, 4096):
        pass
    os._exit(status)


def watch_parent(on_gone: Callable[[], None]) -> None:
    """Calls it in a thread of its own. Nothing is watched where the parent cannot be seen from
    here (another pid namespace's)."""
    try:
        pidfd = os.pidfd_open(os.getppid())
    except OSError:
        return
    threading.Thread(
        target=_wait_for, args=(pidfd, on_gone), name="parent-watch", daemon=True
    ).start()


def _wait_for(pidfd: int, on_gone: Callable[[], None]) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    while not poller.poll():
        pass
    on_gone()
