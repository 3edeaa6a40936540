"""What comes off the wire is decoded or dropped, never trusted and never fatal."""

from __future__ import annotations

import ctypes

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.events import PoolMemory
from kv_transfer.frames import (
    Abort,
    Ack,
    Announce,
    Credit,
    Frame,
    Ping,
    Pong,
    PullFrame,
    Resend,
    Stopped,
    decode,
    encode,
    segment_tag,
)
from kv_transfer.memory import BlockMemory
from tests.support.kv_pair import LAYOUT

BIG = (1 << 64) - 1
PULL = PullFrame(
    sender=BIG,
    session=9,
    source=BIG,
    router_epoch=BIG,
    counter=3,
    attempt=1,
    pull_token=b"token",
    reply_address=b"address",
    layout_digest=b"12345678",
    num_source_blocks=4,
    segment_bytes_max=1 << 20,
    credit=4,
    positions=b"\x01\x00\x00\x00",
)
FRAMES: list[Frame] = [
    PULL,
    Announce(sender=1, session=2, segment=3, first=4, count=5, num_bytes=6, checksum=BIG),
    Credit(sender=1, session=2, segments=1),
    Resend(sender=1, session=2, segment=65_535),
    Ack(sender=1, session=2),
    Abort(sender=1, session=2),
    Stopped(sender=1, session=2, reason="lease", message="over"),
    Ping(sender=1),
    Pong(sender=1),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_round_trip(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize(
    "changes",
    [
        {"session": 0},
        {"session": 1 << 32},
        {"source": -1},
        {"num_source_blocks": -1},
        {"credit": 0},
        {"credit": 1 << 20},
        {"segment_bytes_max": 0},
        {"pull_token": b""},
        {"pull_token": b"x" * 65},
        {"reply_address": b""},
        {"reply_address": b"x" * 5000},
        {"positions": b"\x01\x00\x00"},
        {"layout_digest": b"short"},
    ],
    ids=str,
)
def test_out_of_range_is_dropped(changes: dict[str, object]) -> None:
    assert decode(encode(msgspec.structs.replace(PULL, **changes))) is None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_harmless(data: bytes) -> None:
    decode(data)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FRAMES), st.integers(0, 1 << 16), st.integers(0, 255))
def test_any_flipped_byte_is_harmless(frame: Frame, at: int, value: int) -> None:
    data = bytearray(encode(frame))
    data[at % len(data)] = value
    decode(bytes(data))


def test_tags_fit_48_bits_and_differ() -> None:
    tags = [
        segment_tag(session, segment) for session in (1, 2, (1 << 32) - 1) for segment in (0, 1)
    ]
    assert len(set(tags)) == 6
    assert max(tags) < 1 << 48


def test_neighbouring_blocks_become_one_region() -> None:
    """F43: ten thousand small descriptors took longer than the wire."""
    data = bytearray(10 * LAYOUT.block_bytes)
    base = address_of(data)
    memory = BlockMemory(PoolMemory(base_address=base, num_blocks=10, layout=LAYOUT))
    size = LAYOUT.block_bytes
    assert memory.regions([0]) == [(base, size)]
    assert memory.regions([]) == []
    assert memory.regions([1, 2, 3, 7, 5, 6, 4]) == [
        (base + size, 3 * size),
        (base + 7 * size, size),
        (base + 5 * size, 2 * size),
        (base + 4 * size, size),
    ]


def address_of(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
