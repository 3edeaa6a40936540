"""What crosses between a frontend and the broker, and in which envelope.

    frontend                         broker
    Knock(nonce)              ->
                              <-     Challenge(cookie), or Wait: the world is loading
    Attach(nonce, cookie)     ->
                              <-     Attached, or Refused
    ... the lane is in use ...
                              <-     WorldEnded, where the world ends first
    Goodbye                   ->
                              <-     GoodbyeAck

A frame is a head and a sealed body. The head names the key of the seal: the attach key by its
id, or, once attached, the frontend by its number, whose key is the lane's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from executor.attach.keys import DOWN, UP, seal, unseal
from executor.world.orders import ProcessName
from protos.errors import ErrorData

PROTOCOL = 1
KEY_MARK, FRONTEND_MARK = b"k", b"f"
FRAME_BYTES_MAX = 8192
WORDS_LENGTH_MAX = 4000


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Knock(_Message, frozen=True):
    protocol: int
    nonce: bytes


class Attach(_Message, frozen=True):
    """`beat_s`: how often the frontend will say that it lives. `num_buckets`: how many
    postprocess workers it has."""

    nonce: bytes
    cookie: bytes
    name: str
    process: ProcessName
    beat_s: float
    num_buckets: int


class Goodbye(_Message, frozen=True):
    pass


FromFrontend: TypeAlias = Knock | Attach | Goodbye


class Challenge(_Message, frozen=True):
    nonce: bytes
    cookie: bytes


class Wait(_Message, frozen=True):
    """The world is not there yet; knock again in a moment."""

    nonce: bytes
    what: str


class Refused(_Message, frozen=True):
    nonce: bytes
    error: ErrorData


class Attached(_Message, frozen=True):
    """A tcp endpoint may name every interface; `leader_host` then tells where rank 0 is, ""
    meaning where the broker is. `silence_s`: without a word for so long the lane is closed."""

    nonce: bytes
    frontend_id: int
    requests_endpoint: str
    results_endpoint: str
    leader: ProcessName
    leader_host: str
    heartbeat_s: float
    silence_s: float


class GoodbyeAck(_Message, frozen=True):
    pass


class WorldEnded(_Message, frozen=True):
    cause: str


FromBroker: TypeAlias = Challenge | Wait | Refused | Attached | GoodbyeAck | WorldEnded

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    UP: msgspec.msgpack.Decoder(FromFrontend),
    DOWN: msgspec.msgpack.Decoder(FromBroker),
}


def key_head(key_id: str) -> bytes:
    return KEY_MARK + key_id.encode()


def frontend_head(frontend_id: int) -> bytes:
    return FRONTEND_MARK + frontend_id.to_bytes(2, "little")


def frontend_in(head: bytes) -> int | None:
    """The number in a frontend's head; None for any other."""
    is_it = len(head) == 3 and head[:1] == FRONTEND_MARK
    return int.from_bytes(head[1:], "little") if is_it else None


def pack(key: bytes, way: bytes, head: bytes, message: FromFrontend | FromBroker) -> bytes:
    return seal(key, way, head, _ENCODER.encode(message))


def unpack(key: bytes, way: bytes, head: bytes, frame: bytes) -> Any:
    """A message of that way; None where the frame is not one of ours."""
    body = unseal(key, way, head, frame)
    if body is None:
        return None
    try:
        return _DECODERS[way].decode(body)
    except msgspec.MsgspecError:
        return None
