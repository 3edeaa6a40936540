"""The control frames of the data plane, and the only place that reads them.

A pull's life on the wire: the target sends `PullFrame` with credit for some
segments; the source answers each grant by `Announce` and the segment itself;
the target grants on (`Credit`), asks once for a damaged segment again
(`Resend`), and ends by `Ack` or `Abort`. The source ends a pull it cannot serve
by `Stopped`: after that frame it announces nothing more for this session, so
the target knows that only receives it has already posted can touch its memory.
`Ping` and `Pong` tell a silent peer from a slow one.

Every frame bears its sender's incarnation. A peer may say anything: `decode`
checks types and ranges, and answers None for what is not one of ours.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from protos.messages import DisaggRequestId, KvLayout

MAX_POSITIONS = 1 << 18
MAX_SEGMENTS = (1 << 16) - 1
GRANT_MAX = 1024
SEGMENT_INDEX_BITS = 16
SESSION_BITS = 32

_U64 = Annotated[int, Meta(ge=0)]  # msgpack has no integer beyond 64 bits
_Session = Annotated[int, Meta(ge=1, lt=1 << SESSION_BITS)]
_SegmentIndex = Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)]
_Count = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
_Grant = Annotated[int, Meta(ge=1, le=GRANT_MAX)]
_Token = Annotated[bytes, Meta(min_length=1, max_length=64)]
_Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
_Address = Annotated[bytes, Meta(min_length=1, max_length=4096)]
_Text = Annotated[str, Meta(max_length=512)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    sender: _U64
    """The incarnation of the engine that sent this."""


class PullFrame(_Frame, frozen=True, tag="pull", kw_only=True):
    """Target to source: send me these blocks. `session` is the target's number for it."""

    session: _Session
    source: _U64
    """The incarnation that the target means; a restarted source refuses."""
    router_epoch: _U64
    counter: _U64
    attempt: Annotated[int, Meta(ge=0, lt=1 << 32)]
    pull_token: _Token
    reply_address: _Address
    layout_digest: _Digest
    num_source_blocks: _Count
    segment_bytes_max: Annotated[int, Meta(ge=1, le=1 << 40)]
    credit: _Grant
    positions: Annotated[bytes, Meta(max_length=4 * MAX_POSITIONS - 4096)]
    """Indices into the offered blocks, int32 little-endian, in the target's order."""

    @property
    def disagg_request_id(self) -> DisaggRequestId:
        return DisaggRequestId(self.router_epoch, self.counter, self.attempt)


class Announce(_Frame, frozen=True, tag="announce", kw_only=True):
    """Source to target: this segment is on its way. It covers positions[first : first + count]."""

    session: _Session
    segment: _SegmentIndex
    first: _Count
    count: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    num_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    checksum: _U64


class Credit(_Frame, frozen=True, tag="credit", kw_only=True):
    """Target to source: so many more segments may be sent."""

    session: _Session
    segments: _Grant


class Resend(_Frame, frozen=True, tag="resend", kw_only=True):
    """Target to source: this segment arrived damaged. Carries the credit for its successor."""

    session: _Session
    segment: _SegmentIndex


class Ack(_Frame, frozen=True, tag="ack", kw_only=True):
    """Target to source: everything arrived and was verified."""

    session: _Session


class Abort(_Frame, frozen=True, tag="abort", kw_only=True):
    """Target to source: stop at the next segment boundary and say so by `Stopped`."""

    session: _Session


class Stopped(_Frame, frozen=True, tag="stopped", kw_only=True):
    """Source to target: nothing more will be announced for this session."""

    session: _Session
    reason: Annotated[str, Meta(max_length=32)]
    message: _Text


class Ping(_Frame, frozen=True, tag="ping", kw_only=True):
    """Either way, while a session is live between the two."""


class Pong(_Frame, frozen=True, tag="pong", kw_only=True):
    """The answer to a `Ping`."""


Frame: TypeAlias = PullFrame | Announce | Credit | Resend | Ack | Abort | Stopped | Ping | Pong

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _ENCODER.encode(frame)


def decode(data: bytes) -> Frame | None:
    """The frame, or None for bytes that no peer of ours would send."""
    try:
        frame = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(frame, PullFrame) and len(frame.positions) % 4:
        return None
    return frame


def layout_digest(layout: KvLayout) -> bytes:
    """Equal digests mean equal layouts; the handshake compares these."""
    return xxhash.xxh3_64_digest(msgspec.msgpack.encode(layout))


def segment_tag(session: int, segment: int) -> int:
    """48 bits, minted by the target: never reused, since sessions never are."""
    assert 0 < session < 1 << SESSION_BITS, session
    assert 0 <= segment <= MAX_SEGMENTS, segment
    return session << SEGMENT_INDEX_BITS | segment
