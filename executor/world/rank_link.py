"""A rank's thread for one of its two links (to the owner, to the leader): it owns the DEALER.

Life: started, says what others queue, beats every period, hands over what it hears, ends by
`close`. It runs while the engine loads or a call takes long, so a rank is heard all its life.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

from executor.world.frames import RankDealer

logger = logging.getLogger(__name__)
REPEAT_S = 0.5
CLOSE_S_MAX = 2.0
T = TypeVar("T")
Ack = TypeVar("Ack")


class RankLink(threading.Thread, Generic[T]):
    """`on_message` and `on_beat` are called on this thread and must not wait."""

    def __init__(
        self,
        name: str,
        dealer: RankDealer[T],
        *,
        beat: object,
        period_s: float,
        messages_max: int,
        on_message: Callable[[T], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._dealer = dealer
        self._beat = beat
        self._period_s = period_s
        self._messages_max = messages_max
        self._on_message = on_message
        self._on_beat = on_beat
        self._queue: deque[object] = deque()
        self._heard: list[T] = []
        self._condition = threading.Condition()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_closing = False

    @property
    def num_bad_frames(self) -> int:
        return self._dealer.num_bad

    # --- from any thread ------------------------------------------------------

    def say(self, message: object) -> bool:
        """False where too much waits already: the other side does not read."""
        with self._condition:
            if len(self._queue) >= self._messages_max:
                return False
            self._queue.append(message)
        os.eventfd_write(self._wake_fd, 1)
        return True

    def ask(self, message: object, kind: type[Ack], timeout_s: float) -> Ack | None:
        """Repeat the message until an answer of this kind comes; None where none did in time."""
        ends_at_s = time.monotonic() + timeout_s
        while (left_s := ends_at_s - time.monotonic()) > 0:
            self.say(message)
            answer = self.wait_for(kind, min(REPEAT_S, left_s))
            if answer is not None:
                return answer
        return None

    def wait_for(self, kind: type[Ack], timeout_s: float) -> Ack | None:
        """The first message of this kind that was ever heard."""
        with self._condition:
            self._condition.wait_for(lambda: self._find(kind) is not None, timeout_s)
            return self._find(kind)

    def close(self) -> None:
        """What was queued is sent first, where it can be."""
        with self._condition:
            self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self.join(CLOSE_S_MAX)

    # --- the thread -----------------------------------------------------------

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        beats_at_s = time.monotonic()
        while not self._is_closing:
            wait_s = max(0.0, beats_at_s - time.monotonic())
            if any(fd == self._wake_fd for fd, _ in poller.poll(int(wait_s * 1000) + 1)):
                os.eventfd_read(self._wake_fd)
            if time.monotonic() >= beats_at_s:
                beats_at_s = time.monotonic() + self._period_s
                self._dealer.send(self._beat)
                self._on_beat()
            self._send_queue()
            self._hear()
        self._send_queue()
        if self._dealer.num_bad:
            logger.warning(
                "%s: %d frames were not ours, and dropped", self.name, self._dealer.num_bad
            )
        self._dealer.socket.close()
        os.close(self._wake_fd)

    def _send_queue(self) -> None:
        with self._condition:
            while self._queue and self._dealer.send(self._queue[0]):
                self._queue.popleft()

    def _hear(self) -> None:
        for message in self._dealer.drain():
            try:
                self._on_message(message)
            except Exception:  # a command that fails is no reason to fall silent
                logger.exception("%s failed", type(message).__name__)
            with self._condition:
                if self._find(type(message)) is None:
                    self._heard.append(message)
                self._condition.notify_all()

    def _find(self, kind: type[Ack]) -> Ack | None:
        """Kept once per kind: what is waited for comes once in a life."""
        return next((message for message in self._heard if isinstance(message, kind)), None)
