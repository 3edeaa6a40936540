"""One ROUTER that serves every rank of a world, and a rank's DEALER to it; frames are sealed.

A frame's label names the rank and the direction, so that nothing can be reflected, replayed
or passed off as another rank's. The router answers where the last frame that verified came
from: a stranger neither takes a rank's place nor learns anything. Over tcp CURVE keeps what
crosses (keys of lanes) from being read.

A socket belongs to one thread.
"""

from __future__ import annotations

import errno
import socket as sockets
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq

from executor.ipc import Context, FrameOpener, FrameSealer

RANK_BYTES = 2
FRAMES_A_TURN_MAX = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SocketBounds:
    queue_messages_max: int
    message_bytes_max: int


def open_router(
    context: Context, endpoint: str, bounds: SocketBounds
) -> tuple[zmq.Socket[bytes], str, str]:
    """(socket, the endpoint that others connect to, its public CURVE key; "" on ipc).

    On tcp the port may be "*"; "tcp" alone stands for any port of this host's own address.
    """
    endpoint = f"tcp://{own_address()}:*" if endpoint == "tcp" else endpoint
    socket = _open(context, zmq.ROUTER, bounds)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    public = ""
    if endpoint.startswith("tcp:"):
        public_key, secret_key = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_secretkey = secret_key
        public = public_key.decode()
    socket.bind(endpoint)
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT), public


def open_dealer(
    context: Context, endpoint: str, curve_key: str, bounds: SocketBounds, linger_ms: int
) -> zmq.Socket[bytes]:
    socket = _open(context, zmq.DEALER, bounds, linger_ms)
    if curve_key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = curve_key.encode()
    socket.connect(endpoint)
    return socket


def _open(
    context: Context, kind: int, bounds: SocketBounds, linger_ms: int = 0
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, bounds.queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, bounds.queue_messages_max)
    socket.setsockopt(zmq.MAXMSGSIZE, bounds.message_bytes_max)
    socket.setsockopt(zmq.LINGER, linger_ms)
    return socket


class RankRouter(Generic[T]):
    """`link` names what the socket is for: two links of one world never verify each other."""

    def __init__(
        self, socket: zmq.Socket[bytes], link: str, key: bytes, num_ranks: int, union: Any
    ) -> None:
        self.socket = socket
        self._openers: list[FrameOpener[T]] = [
            FrameOpener(key, _label(link, rank, "up"), union) for rank in range(num_ranks)
        ]
        self._sealers = [FrameSealer(key, _label(link, rank, "down")) for rank in range(num_ranks)]
        self._routes: dict[int, bytes] = {}
        self._num_strange = 0

    @property
    def num_bad(self) -> int:
        return self._num_strange + sum(opener.num_bad for opener in self._openers)

    def send(self, rank: int, message: object) -> bool:
        """False where the rank was never heard, is gone, or does not read."""
        route = self._routes.get(rank)
        if route is None:
            return False
        try:
            self.socket.send_multipart((route, self._sealers[rank].seal(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def drain(self) -> list[tuple[int, T]]:
        """What has arrived, in order, of FRAMES_A_TURN_MAX frames at most; never waits."""
        messages: list[tuple[int, T]] = []
        for _ in range(FRAMES_A_TURN_MAX):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            opened = self._open(parts)
            if opened is not None:
                messages.append(opened)
        return messages

    def has_frames(self) -> bool:
        return bool(int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _open(self, parts: list[bytes]) -> tuple[int, T] | None:
        if len(parts) != 3 or len(parts[1]) != RANK_BYTES:
            self._num_strange += 1
            return None
        rank = int.from_bytes(parts[1], "little")
        if rank >= len(self._openers):
            self._num_strange += 1
            return None
        message = self._openers[rank].open(parts[2])
        if message is None:
            return None
        self._routes[rank] = parts[0]
        return rank, message


class RankDealer(Generic[T]):
    """A rank's end."""

    def __init__(
        self, socket: zmq.Socket[bytes], link: str, key: bytes, rank: int, union: Any
    ) -> None:
        self.socket = socket
        self._prefix = rank.to_bytes(RANK_BYTES, "little")
        self._sealer = FrameSealer(key, _label(link, rank, "up"))
        self.opener: FrameOpener[T] = FrameOpener(key, _label(link, rank, "down"), union)
        self._num_strange = 0

    @property
    def num_bad(self) -> int:
        return self._num_strange + self.opener.num_bad

    def send(self, message: object) -> bool:
        """False where the queue is full; nothing was sent then."""
        try:
            self.socket.send_multipart((self._prefix, self._sealer.seal(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def drain(self) -> list[T]:
        messages: list[T] = []
        for _ in range(FRAMES_A_TURN_MAX):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._open(parts)
            if message is not None:
                messages.append(message)
        return messages

    def _open(self, parts: list[bytes]) -> T | None:
        if len(parts) != 1:
            self._num_strange += 1
            return None
        return self.opener.open(parts[0])


def _label(link: str, rank: int, way: str) -> bytes:
    return f"{link}-{rank}-{way}:".encode()


def own_address() -> str:
    """The address by which other hosts reach this one. Nothing is sent to find it."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:  # no route to anywhere: this host alone then
            return "127.0.0.1"
