"""A zmq socket that is read on the event loop, for small and rare frames.

The descriptor tells of what is new and not of what is there, so after every look and every send
the socket is asked again. Open from construction to `close`, which is safe twice.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import zmq

from executor.attach.messages import FRAME_BYTES_MAX
from executor.ipc import end_context, new_context

FRAMES_A_TURN_MAX = 64
"""Then the others on the loop have their turn, however many strangers shout."""
QUEUE_FRAMES_MAX = 256
HANDSHAKE_MS_MAX = 5000


class LoopSocket:
    """`on_frames` gets the parts of one message; it must not wait."""

    def __init__(self, kind: int, on_frames: Callable[[list[bytes]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._context = new_context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        self.socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS_MAX)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._fd = -1
        self.peer = ""
        """Over tcp, where the message came from that `on_frames` is called with."""

    def start(self) -> None:
        """Once the socket is bound or connects."""
        self._fd = int(self.socket.FD)
        self._loop.add_reader(self._fd, self._take)
        self._loop.call_soon(self._take)

    def send(self, parts: list[bytes]) -> bool:
        """False where nobody is there, or does not read."""
        if self._fd < 0:
            return False
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        finally:
            self._loop.call_soon(self._take)
        return True

    def close(self, linger_ms: int = 0) -> None:
        """What was sent gets `linger_ms` to leave, and the loop waits for it."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
        if not self.socket.closed:
            self.socket.close(linger=linger_ms)
            end_context(self._context)

    def _take(self) -> None:
        for _ in range(FRAMES_A_TURN_MAX):
            if self._fd < 0:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.peer = _peer(frames[0])
            self._on_frames([frame.bytes for frame in frames])
        if self._fd >= 0:
            self._loop.call_soon(self._take)


def _peer(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # not over tcp
        return ""
