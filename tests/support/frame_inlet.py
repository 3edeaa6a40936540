"""One socket of the executor, in traffic, with a hand on the wire before it.

What `inject` puts on its wire comes to it as from its peer, or, where anybody can connect, from a
stranger; `probe` is a request that goes by it and must be answered. A PAIR has one peer only, so
what goes to it is put on that peer's own socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import zmq

from executor.ipc import FrameSealer, FrameSender

UNTIL_S = 5.0
Parts = list[bytes]


@dataclass(kw_only=True)
class Inlet:
    inject: Callable[[Parts], Any]
    good: Callable[[], Parts]
    """A frame of the right peer; asked for after a probe."""
    replay: Callable[[], Parts] | None = None
    """One that has served already; None where the good one has."""
    num_bad: Callable[[], int]
    probe: Callable[[], Awaitable[None]]
    strange: tuple[Parts, ...] = ()
    """Messages of parts that do not make one of ours."""


Opened = AbstractAsyncContextManager[Inlet]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(UNTIL_S):
        while not holds():  # noqa: ASYNC110 - threads tell nobody
            await asyncio.sleep(0.005)


def recorded(sealer: FrameSealer) -> list[bytes]:
    """What it seals from now on."""
    frames: list[bytes] = []
    seal = sealer.seal

    def recording(message: object) -> bytes:
        frames.append(seal(message))
        return frames[-1]

    sealer.seal = recording  # type: ignore[method-assign]
    return frames


def onto(sender: FrameSender, lock: Any = None) -> Callable[[Parts], None]:
    """The wire behind a PAIR; `lock` is what its users share."""

    def inject(parts: Parts) -> None:
        with lock or contextlib.nullcontext(), contextlib.suppress(zmq.Again):
            sender.socket.send_multipart(parts, zmq.NOBLOCK)  # what is not sent is not counted

    return inject
