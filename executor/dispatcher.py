"""The proxy's receiving thread: frames in, one wake of the event loop per batch out.

Life: started once, ends by `stop` or by a crash, which is reported and never
mended by a silent restart. What the loop has not taken yet is bounded: beyond
that the thread stops reading, and the worker feels it through its socket.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

from executor.ipc import FrameReceiver

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Dispatcher(threading.Thread, Generic[T]):
    def __init__(
        self,
        receiver: FrameReceiver[T],
        loop: asyncio.AbstractEventLoop,
        *,
        messages_max: int,
        on_messages: Callable[[list[T]], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        super().__init__(name="result-dispatch", daemon=True)
        self._receiver = receiver
        self._loop = loop
        self._messages_max = messages_max
        self._on_messages = on_messages
        self._on_crash = on_crash
        self._stop_fd = os.eventfd(0)
        self._condition = threading.Condition()
        self._messages: list[T] = []
        self._is_stopped = False
        self.num_wakes = 0

    def run(self) -> None:
        try:
            self._loop_until_stopped()
        except Exception as error:
            logger.exception("the result dispatcher crashed")
            self._call_loop(functools.partial(self._on_crash, error))
        finally:
            self._receiver.socket.close(linger=0)

    def stop(self, timeout_s: float) -> bool:
        """From another thread. False where the thread did not end in time (and leaks)."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        os.eventfd_write(self._stop_fd, 1)
        self.join(timeout_s)
        if self.is_alive():
            return False
        os.close(self._stop_fd)
        return True

    def _loop_until_stopped(self) -> None:
        poller = zmq.Poller()
        poller.register(self._receiver.socket, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        while not self._is_stopped:
            poller.poll()
            messages = self._receiver.drain(self._messages_max)
            if messages:
                self._hand_over(messages)

    def _hand_over(self, messages: list[T]) -> None:
        with self._condition:
            while len(self._messages) >= self._messages_max and not self._is_stopped:
                self._condition.wait()
            needs_wake = not self._messages
            self._messages.extend(messages)
        if needs_wake:
            self.num_wakes += 1
            self._call_loop(self._deliver)

    def _deliver(self) -> None:
        """On the event loop."""
        with self._condition:
            messages, self._messages = self._messages, []
            self._condition.notify_all()
        self._on_messages(messages)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._is_stopped = True
