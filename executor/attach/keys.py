"""Keys of attaching: who may ask, and what one lane's key is made of.

Whoever may attach shares a key with the broker: the cluster's, or a fresh one that the owner
hands to the frontends it starts. Out of it and both sides' nonces comes each lane's own key,
which never crosses the wire; nor does the lane's CURVE key over tcp, which both sides make
out of the lane's. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

TAG_BYTES = 32
NONCE_BYTES = 16
LOCAL_KEY_ID = "local"
UP, DOWN = b"up:", b"down:"


@dataclass(frozen=True)
class AttachKeys:
    """By key id; a frontend uses the first, the broker takes any."""

    keys: Mapping[str, bytes] = field(repr=False)

    @property
    def first_id(self) -> str:
        return next(iter(self.keys))

    @classmethod
    def local(cls, key: bytes) -> AttachKeys:
        return cls({LOCAL_KEY_ID: key})


def lane_key(attach_key: bytes, nonce: bytes, cookie: bytes, frontend_id: int) -> bytes:
    """`nonce` is the frontend's, `cookie` the broker's: neither can make an old key come back."""
    return _derive(attach_key, b"lane", nonce, cookie, frontend_id.to_bytes(2, "little"))


def curve_seed(key: bytes) -> bytes:
    """A lane's secret CURVE key, 32 bytes."""
    return _derive(key, b"curve")


def seal(key: bytes, way: bytes, head: bytes, body: bytes) -> bytes:
    return _derive(key, way, head, body) + body


def unseal(key: bytes, way: bytes, head: bytes, frame: bytes) -> bytes | None:
    """The body, or None where the frame was not made with this key for this way and head."""
    tag, body = frame[:TAG_BYTES], frame[TAG_BYTES:]
    return body if hmac.compare_digest(tag, _derive(key, way, head, body)) else None


def _derive(key: bytes, *parts: bytes) -> bytes:
    """Each part with its length before it, so that no two lists of parts look alike."""
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(key, message, hashlib.sha256)
