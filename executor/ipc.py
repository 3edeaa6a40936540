"""Authenticated frames over pyzmq: how messages cross between two of our processes.

Each direction is a PAIR socket on an ipc endpoint in a private directory. A
frame is HMAC-SHA256 tag, sequence number, msgpack payload; the tag covers the
direction too, so that nothing can be reflected or replayed. A frame that does
not verify is counted and dropped; one that does and cannot be decoded is a lost
message, of which whoever reads has to speak (`num_malformed`). No pickle anywhere.

A socket belongs to one thread at a time: each `FrameSender` and `FrameReceiver`
is used by one thread, or under its user's lock.
"""

from __future__ import annotations

import hmac
from typing import Generic, TypeAlias, TypeVar

import msgspec
import zmq

from common.scratch import ScratchFolder, sweep
from protos.errors import ConfigError, ServerUnavailableError

KEY_BYTES = 32
TAG_BYTES = 32
SEQUENCE_BYTES = 8
IPC_PATH_LENGTH_MAX = 107  # sockaddr_un.sun_path, without its end
FRAME_ROOM_BYTES = 4096
"""What a frame may have around its messages: tag, number, envelope, what CURVE adds."""
FOLDER_PREFIX = "baton-ipc-"
TO_WORKER = b"to-worker"
TO_PROXY = b"to-proxy"

T = TypeVar("T")
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
_contexts: set[Context] = set()
"""Those that are open. Collected as garbage, one would wait in its end for the sockets that are
collected with it, for ever: better that what nobody closed leaks."""


def new_context() -> Context:
    """Every context of ours is one of these, and open until `end_context`."""
    context: Context = zmq.Context()
    _contexts.add(context)
    return context


def end_context(context: Context) -> None:
    """Waits for its sockets' lingers; all of them are closed. Safe twice."""
    context.term()
    _contexts.discard(context)


class PrivateDirectory(ScratchFolder):
    """A fresh 0700 folder for socket files; `close` removes it and is safe twice."""

    def __init__(self) -> None:
        super().__init__(FOLDER_PREFIX)

    def endpoint(self, name: str) -> str:
        path = str(self.path / name)
        if len(path.encode()) > IPC_PATH_LENGTH_MAX:
            self.close()
            raise ConfigError(
                f"the socket path {path} is longer than {IPC_PATH_LENGTH_MAX} bytes; "
                "set TMPDIR to a shorter folder",
                field="TMPDIR",
                value=path,
                limit=IPC_PATH_LENGTH_MAX,
            )
        return f"ipc://{path}"


def sweep_folders() -> None:
    """Remove what killed processes have left."""
    sweep(FOLDER_PREFIX)


def open_pair(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    *,
    is_server: bool,
    queue_messages_max: int,
    message_bytes_max: int,
    linger_ms: int,
    curve_secret_key: bytes = b"",
    curve_server_key: bytes = b"",
) -> zmq.Socket[bytes]:
    """A bounded PAIR socket.

    Over tcp, where strangers may connect, the side that binds has `curve_secret_key`
    and the other one `curve_server_key`, its public half: without it nobody takes
    the one place that a PAIR has. Both are Z85 text, as `zmq.curve_keypair` gives them.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, queue_messages_max)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    if curve_secret_key:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret_key)
    if curve_server_key:
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve_server_key)
    try:
        if is_server:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ServerUnavailableError(f"the queue at {endpoint} cannot be opened: {error}") from None
    return socket


def bound_to(socket: zmq.Socket[bytes]) -> str:
    """The endpoint that was taken: where a port was asked for as `*`, its number."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class FrameSealer:
    """Makes frames of one direction, each with the next sequence number."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()

    def seal(self, message: object) -> bytes:
        """Encoded first, counted then: what cannot be encoded must leave no gap."""
        payload = self._encoder.encode(message)
        self._sequence += 1
        body = self._sequence.to_bytes(SEQUENCE_BYTES, "little") + payload
        return hmac.digest(self._key, self._direction + body, "sha256") + body

    def take_back(self) -> None:
        """The last frame was not sent: its number is free again."""
        self._sequence -= 1


class FrameOpener(Generic[T]):
    """Verifies and decodes frames of one direction; counts what it must drop."""

    def __init__(self, key: bytes, direction: bytes, union: type[T]) -> None:
        self._key = key
        self._direction = direction
        self._sequence = 0
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self.num_unauthenticated = 0
        self.num_lost = 0
        """Frames of this direction that never came: only a broken connection loses any."""
        self.num_replayed = 0
        self.num_malformed = 0

    @property
    def num_bad(self) -> int:
        return self.num_unauthenticated + self.num_replayed + self.num_malformed

    def open(self, frame: bytes) -> T | None:
        """The message, or None where the frame is not one of ours."""
        tag, body = frame[:TAG_BYTES], frame[TAG_BYTES:]
        expected = hmac.digest(self._key, self._direction + body, "sha256")
        if len(body) < SEQUENCE_BYTES or not hmac.compare_digest(tag, expected):
            self.num_unauthenticated += 1
            return None
        sequence = int.from_bytes(body[:SEQUENCE_BYTES], "little")
        if sequence <= self._sequence:
            self.num_replayed += 1
            return None
        self.num_lost += sequence - self._sequence - 1
        self._sequence = sequence
        try:
            return self._decoder.decode(body[SEQUENCE_BYTES:])
        except msgspec.MsgspecError:  # sealed by us, so another version of us
            self.num_malformed += 1
            return None


class FrameSender:
    def __init__(self, socket: zmq.Socket[bytes], sealer: FrameSealer) -> None:
        self.socket = socket
        self._sealer = sealer

    def has_room(self, timeout_s: float = 0.0) -> bool:
        """Whether a peer is connected and its queue not full."""
        try:
            return bool(self.socket.poll(int(timeout_s * 1000), zmq.POLLOUT))
        except zmq.ZMQError:  # the socket is closed, or its context
            return False

    def send(self, message: object, timeout_s: float = 0.0) -> bool:
        """False where the peer's queue stayed full for `timeout_s`; nothing was sent then.

        Raises what encoding raises: messages that others have made are packed beforehand.
        """
        if timeout_s and not self.has_room(timeout_s):
            return False
        frame = self._sealer.seal(message)
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:  # there is no room, or the peer has just gone, or we have
            self._sealer.take_back()
            return False
        return True

    def close(self) -> None:
        """What was not sent is dropped."""
        self.socket.close(linger=0)


class FrameReceiver(Generic[T]):
    def __init__(self, socket: zmq.Socket[bytes], opener: FrameOpener[T]) -> None:
        self.socket = socket
        self.opener = opener
        self.may_have_more = True
        """False where the last `drain` took all that had arrived by then."""

    def drain(self, messages_max: int) -> list[T]:
        """What has arrived, in order, at most `messages_max` frames; never waits."""
        messages: list[T] = []
        self.may_have_more = True
        for _ in range(messages_max):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self.may_have_more = False
                break
            message = self.opener.open(frame)
            if message is not None:
                messages.append(message)
        return messages
