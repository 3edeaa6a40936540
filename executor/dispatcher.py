"""The reading of a socket on the event loop: frames in, batches of messages out.

Life: `start` to `stop`, or to a crash, which is reported once and never mended
by a silent restart. There is no thread between: the loop hears of new frames by
the socket's descriptor. What it reads at a time is handed on in turns, between
which the others on the loop have theirs; nothing is read before the last of them.
What the loop does not read stays in the socket, whose bound the sender feels.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from executor.ipc import FrameReceiver

logger = logging.getLogger(__name__)
T = TypeVar("T")
FRAMES_MAX = 16
"""So many are read at a time."""


def in_one_turn(messages: list[T]) -> list[list[T]]:
    return [messages]


class Dispatcher(Generic[T]):
    """Everything here runs on `loop`. `in_turns` cuts what was read at a time."""

    def __init__(
        self,
        receiver: FrameReceiver[T],
        loop: asyncio.AbstractEventLoop,
        *,
        on_messages: Callable[[list[T]], None],
        on_crash: Callable[[Exception], None],
        in_turns: Callable[[list[T]], list[list[T]]] = in_one_turn,
    ) -> None:
        self._receiver = receiver
        self._loop = loop
        self._on_messages = on_messages
        self._on_crash = on_crash
        self._in_turns = in_turns
        self._turns: deque[list[T]] = deque()
        self._fd = -1
        self._is_held = False
        self._is_scheduled = False
        self.num_wakes = 0

    def start(self) -> None:
        self._fd = int(self._receiver.socket.FD)
        self._listen()

    def hold(self, is_held: bool) -> None:
        """Hand nothing on for a while; what comes stays in the socket."""
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
        self._turns.clear()
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
        self._take(FRAMES_MAX)

    def _on_readable(self) -> None:
        """The first is dealt with before it is asked whether there are more: mostly there are
        not, and to hear so takes about as long as to read one."""
        if not self._is_scheduled:  # else that turn is soon enough
            self._take(1)

    def _take(self, frames_max: int) -> None:
        if self._fd < 0 or self._is_held:
            return
        self.num_wakes += 1
        try:
            if not self._turns:
                self._read(frames_max)
            if self._turns:
                self._on_messages(self._turns.popleft())
        except Exception as error:
            logger.exception("reading the results crashed")
            self.stop()
            self._on_crash(error)
            return
        if self._turns or self._receiver.may_have_more:
            self._schedule()

    def _read(self, frames_max: int) -> None:
        messages = self._receiver.drain(frames_max)
        if messages:
            self._turns.extend(self._in_turns(messages))
