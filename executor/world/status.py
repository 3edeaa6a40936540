"""The owner's end of the status socket, on its event loop: ranks speak, the owner answers.

Everything here is small and rare: HELLO, READY, last words, beats, lanes. No thread is needed:
the loop hears of frames by the socket's descriptor. That one tells of what is new, not of what
is there, so after every look and every send the socket is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor.ipc import end_context, new_context
from executor.world.frames import RankRouter, SocketBounds, open_router
from executor.world.messages import STATUS_LINK, ToOwner, ToRank


class StatusServer:
    """Open from construction to `close`, which is safe twice."""

    def __init__(
        self,
        endpoint: str,
        *,
        key: bytes,
        num_ranks: int,
        bounds: SocketBounds,
        on_message: Callable[[int, ToOwner], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = new_context()
        socket, self.endpoint, self.curve_key = open_router(self._context, endpoint, bounds)
        self._router: RankRouter[ToOwner] = RankRouter(socket, STATUS_LINK, key, num_ranks, ToOwner)
        self._on_message = on_message
        self._fd = int(socket.FD)
        self._loop.add_reader(self._fd, self._take)

    @property
    def num_bad_frames(self) -> int:
        return self._router.num_bad

    def send(self, rank: int, message: ToRank) -> bool:
        """False where the rank cannot be reached."""
        if self._fd < 0:
            return False
        was_sent = self._router.send(rank, message)
        self._loop.call_soon(self._take)
        return was_sent

    def take(self) -> None:
        """Look now, ahead of the event loop's turn."""
        self._take()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
            self._router.socket.close(linger=0)
            end_context(self._context)

    def _take(self) -> None:
        if self._fd < 0:
            return
        for rank, message in self._router.drain():
            self._on_message(rank, message)
            if self._fd < 0:  # it was the last thing we wanted to hear
                return
        if self._router.has_frames():
            self._loop.call_soon(self._take)
