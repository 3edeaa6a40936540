"""How a rank notices that the world's owner is gone: it then ends itself, whatever it does.

On the owner's host its pidfd tells at once; on another host its silence does, in time.
"""

from __future__ import annotations

import os
import select
import threading
import time

from executor.parent import EXIT_PARENT_GONE
from executor.world.orders import ProcessName, open_pidfd


class OwnerWatch:
    """`on_heard` and `look` serve an owner elsewhere; `look` is called every heartbeat."""

    def __init__(self, owner: ProcessName, silence_s_max: float) -> None:
        self._is_here = owner.is_here()
        self._silence_s_max = silence_s_max
        self._heard_at_s = self._looked_at_s = time.monotonic()
        self._is_over = False
        if self._is_here:
            self._watch_process(owner)

    def disarm(self) -> None:
        """The rank's part is over; its process may live on for others' sake."""
        self._is_over = True

    def on_heard(self) -> None:
        self._heard_at_s = time.monotonic()

    def look(self) -> None:
        """A long time since the last look means that it was we who slept."""
        now_s = time.monotonic()
        slept_s, self._looked_at_s = now_s - self._looked_at_s, now_s
        if self._is_here or slept_s > self._silence_s_max:
            self._heard_at_s = max(self._heard_at_s, now_s - self._silence_s_max / 2)
        elif now_s - self._heard_at_s > self._silence_s_max and not self._is_over:
            os._exit(EXIT_PARENT_GONE)

    def _watch_process(self, owner: ProcessName) -> None:
        try:
            pidfd = open_pidfd(owner)
        except ProcessLookupError:
            os._exit(EXIT_PARENT_GONE)
        threading.Thread(
            target=self._wait_for, args=(pidfd,), name="owner-watch", daemon=True
        ).start()

    def _wait_for(self, pidfd: int) -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        while not poller.poll():
            pass
        if not self._is_over:
            os._exit(EXIT_PARENT_GONE)
