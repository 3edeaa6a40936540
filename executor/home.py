"""Where results are pushed: one event loop, the thread that runs it, and how to reach others.

A consumer on the home loop is woken on the spot. One that awaits on another
loop (a user's own, beside the one that an `LLM` runs) is woken through that
loop's queue: once for all that one batch brought, however many of its results
are waited for there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

Arguments = TypeVarTuple("Arguments")


class ServingThread(threading.Thread):
    """An engine's own thread, for the home that starts it: a caller's code runs on it too."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.home_thread = threading.current_thread()


def is_needed_here(thread: threading.Thread) -> bool:
    """Whether whoever waits for `thread` here waits for itself: this is that thread, or the
    engine's, without which it has nothing to tell."""
    here = threading.current_thread()
    return here is thread or (isinstance(here, ServingThread) and here.home_thread is thread)


class Home:
    """Made on its loop, by `here`. `wake_elsewhere` is for the home thread alone."""

    __slots__ = ("_elsewhere", "loop", "num_calls_elsewhere", "thread")

    def __init__(self, loop: asyncio.AbstractEventLoop | None, thread: threading.Thread) -> None:
        self.loop = loop
        self.thread = thread
        self._elsewhere: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self.num_calls_elsewhere = 0

    @classmethod
    def here(cls) -> Home:
        """Without a running loop nobody can wait here, but results can be pushed and read."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        return cls(loop, threading.current_thread())

    def is_here(self) -> bool:
        """By the thread itself: its number may be another's once it has ended."""
        return threading.current_thread() is self.thread

    def is_waiting_for_us(self) -> bool:
        """Whether a blocking call here would wait for itself."""
        return is_needed_here(self.thread)

    def is_alive(self) -> bool:
        """Whether anything can still be pushed."""
        return self.thread.is_alive() and not (self.loop is not None and self.loop.is_closed())

    def call(self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments) -> None:
        """In a turn of the loop of its own, at home too: the garbage collector and signal
        handlers call in the midst of whatever home is doing. Never where the loop is closed."""
        if self.loop is None:
            callback(*args)
            return
        with contextlib.suppress(RuntimeError):  # closed: whatever it was for has ended
            self.loop.call_soon_threadsafe(callback, *args)

    def wake_elsewhere(self, waiter: asyncio.Future[None]) -> None:
        """Its loop is called once the batch that wakes it is dealt with."""
        if not self._elsewhere and self.loop is not None:
            self.loop.call_soon(self._call_elsewhere)
        self._elsewhere.setdefault(waiter.get_loop(), []).append(waiter)
        if self.loop is None:
            self._call_elsewhere()

    def _call_elsewhere(self) -> None:
        elsewhere, self._elsewhere = self._elsewhere, {}
        for loop, waiters in elsewhere.items():
            self.num_calls_elsewhere += 1
            with contextlib.suppress(RuntimeError):  # closed: nobody waits there any more
                loop.call_soon_threadsafe(wake_all, waiters)


def wake_all(waiters: list[asyncio.Future[None]]) -> None:
    """On the waiters' own loop."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
