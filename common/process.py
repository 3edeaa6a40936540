"""What every process of ours does alike: its arguments, its signals, its READY line."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.logs import LEVELS
from protos.errors import ConfigError

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_ENGINE_DEAD = 70
"""EX_SOFTWARE of sysexits.h: the engine, or we ourselves, failed."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The command line of a server or router process."""

    config: Path
    ready_fd: int | None = None
    log_level: str | None = None
    die_with_parent: bool = False
    listen: str | None = None
    """Over the file's."""
    frontends: int | None = None
    """Over the file's."""
    attach_fd: int | None = None
    """An inherited descriptor; it tells a frontend where to attach."""


_MORE: dict[str, dict[str, Any]] = {
    "listen": {"metavar": "HOST:PORT", "help": "over the file's listen"},
    "frontends": {
        "type": int,
        "metavar": "N",
        "help": "serving processes that share the engine and the port, over the file's frontends",
    },
    "attach_fd": {"type": int, "help": argparse.SUPPRESS},
}


def parse_options(
    program: str, about: str, argv: Sequence[str] | None, *, more: Sequence[str] = ()
) -> ProcessOptions:
    """`more`: which options beyond the common ones the program takes."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--config", type=Path, required=True, help="the YAML file")
    parser.add_argument(
        "--ready-fd",
        type=int,
        metavar="N",
        help="write 'READY HOST:PORT' to this inherited descriptor when ready",
    )
    parser.add_argument("--log-level", choices=tuple(LEVELS), help="over the file's log_level")
    parser.add_argument(
        "--die-with-parent",
        action="store_true",
        help="end by SIGTERM when the process that started this one dies",
    )
    for name in more:
        parser.add_argument(f"--{name.replace('_', '-')}", **_MORE[name])
    return ProcessOptions(**vars(parser.parse_args(argv)))


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM at the parent's death (Linux)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise ConfigError(f"--die-with-parent does not work here: errno {ctypes.get_errno()}")
    if os.getppid() != parent:  # it died while we asked
        os.kill(os.getpid(), signal.SIGTERM)


def tell_ready(ready_fd: int | None, address: str) -> None:
    """Write the READY line and close the descriptor. A launcher that left is no error."""
    if ready_fd is None:
        return
    try:
        with os.fdopen(ready_fd, "w") as file:
            file.write(f"READY {address}\n")
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            raise ConfigError(
                f"--ready-fd {ready_fd} cannot be written: {error.strerror}", field="ready_fd"
            ) from error


class StopSignals:
    """SIGTERM and SIGINT ask to stop; a second one ends the process at once.

    Used as a context manager on the event loop's thread; `stopping` is set by
    the first signal. A process that is `led` by another of ours leaves both to
    that one, which hears the terminal's signals too: SIGINT is ignored, and a
    second SIGTERM says nothing new.
    """

    def __init__(self, *, is_led: bool = False) -> None:
        self.stopping = asyncio.Event()
        self._is_led = is_led
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_led:
            if number == signal.SIGTERM:
                self.stopping.set()
            return
        if self.stopping.is_set():
            os._exit(128 + number)
        self.stopping.set()
