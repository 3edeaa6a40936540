"""The proxy's reading of its result socket, on the event loop: frames in, batches out.

Life: `start` to `stop`, or to a crash, which is reported once and never mended
by a silent restart. There is no thread between: the loop hears of new frames by
the socket's descriptor, so a step's responses cost it one call. What the loop
does not take stays in the socket, whose bound the worker feels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from executor.ipc import FrameReceiver

logger = logging.getLogger(__name__)
T = TypeVar("T")
FRAMES_A_TURN_MAX = 16
"""Then the others on the loop have their turn: whoever was woken reads before more comes."""


class Dispatcher(Generic[T]):
    """Everything here runs on `loop`."""

    def __init__(
        self,
        receiver: FrameReceiver[T],
        loop: asyncio.AbstractEventLoop,
        *,
        on_messages: Callable[[list[T]], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._receiver = receiver
        self._loop = loop
        self._on_messages = on_messages
        self._on_crash = on_crash
        self._fd = -1
        self._is_held = False
        self._is_scheduled = False
        self.num_wakes = 0

    def start(self) -> None:
        self._fd = int(self._receiver.socket.FD)
        self._listen()

    def hold(self, is_held: bool) -> None:
        """Read nothing for a while; what comes stays in the socket."""
        if self._fd < 0 or is_held == self._is_held:
            return
        self._is_held = is_held
        if is_held:
            self._loop.remove_reader(self._fd)
        else:
            self._listen()

    def stop(self) -> None:
        """Nothing is delivered after it. Safe twice."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
        self._receiver.socket.close(linger=0)

    def _listen(self) -> None:
        self._loop.add_reader(self._fd, self._on_readable)
        self._schedule()  # the descriptor tells of what is new, not of what is

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._is_scheduled = False
        self._take()

    def _on_readable(self) -> None:
        if not self._is_scheduled:  # else that turn is soon enough
            self._take()

    def _take(self) -> None:
        if self._fd < 0 or self._is_held:
            return
        self.num_wakes += 1
        try:
            messages = self._receiver.drain(FRAMES_A_TURN_MAX)
            if messages:
                self._on_messages(messages)
        except Exception as error:
            logger.exception("reading the results crashed")
            self.stop()
            self._on_crash(error)
            return
        if self._receiver.may_have_more:
            self._schedule()
