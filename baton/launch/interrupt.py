"""SIGINT and SIGTERM as a descriptor that a selector can wait for.

Used as a context manager on the main thread. The handlers do nothing but
remember; the wake-up descriptor makes the wait end.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """`fd` is readable once one of the signals came; `number` is the first that did."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.number: int | None = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupt]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    interrupt = Interrupt(reader)
    old_handlers: dict[int, Any] = {
        number: signal.signal(number, interrupt._handle) for number in SIGNALS
    }
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield interrupt
    finally:
        signal.set_wakeup_fd(old_writer)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
