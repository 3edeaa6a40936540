"""The Transport contract, run for every implementation.

Each test drives two transports of one kind, polled in turn by the test itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.faulty import FaultyTransport
from kv_transfer.inproc import InprocNetwork
from kv_transfer.transport import (
    FRAME_BYTES_MAX,
    FrameReceived,
    PeerDown,
    Region,
    SegmentReceived,
    SegmentSent,
    Transport,
    TransportEvent,
)

PIECE = 64 << 10
TLS = {"ucx-tcp": "tcp,self", "ucx-shm": "tcp,self,posix,cma"}


def make_factory(kind: str) -> Callable[[], Transport]:
    network = InprocNetwork()
    settings = TransportSettings(network=network, tls=TLS.get(kind, ""), close_s_max=1.0)
    if kind == "faulty":
        return lambda: FaultyTransport(create_transport("inproc", settings))
    return lambda: create_transport("inproc" if kind == "inproc" else "ucx", settings)


@dataclass
class Pair:
    left: Transport
    right: Transport
    to_right: int
    to_left: int

    def poll(
        self, is_there: Callable[[list[TransportEvent], list[TransportEvent]], bool]
    ) -> tuple[list[TransportEvent], list[TransportEvent]]:
        """Poll both until their events satisfy `is_there`; (left's, right's)."""
        left: list[TransportEvent] = []
        right: list[TransportEvent] = []
        end = time.monotonic() + 10.0
        while not is_there(left, right):
            assert time.monotonic() < end, f"left heard {left}, right heard {right}"
            left += self.left.poll(0.001)
            right += self.right.poll(0.001)
        return left, right


@pytest.fixture(params=["inproc", "faulty", "ucx-tcp", "ucx-shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    factory = make_factory(request.param)
    left, right = factory(), factory()
    made = Pair(left, right, left.connect(right.address), right.connect(left.address))
    yield made
    left.close()
    right.close()


class Memory:
    def __init__(self, num_bytes: int, fill: int = 0) -> None:
        self.data = mmap.mmap(-1, num_bytes)
        self.data[:] = bytes([fill]) * num_bytes
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def pieces(self, num_bytes: int, order: list[int]) -> list[Region]:
        return [(self.base + index * num_bytes, num_bytes) for index in order]


def frames(events: list[TransportEvent]) -> list[bytes]:
    return [event.frame for event in events if isinstance(event, FrameReceived)]


def test_frames_arrive_whole_and_in_order_both_ways(pair: Pair) -> None:
    """A long frame (UCX rendezvous) must not be overtaken by the short ones behind it."""
    sent = [b"first", b"x" * FRAME_BYTES_MAX, b"", *(b"%d" % i for i in range(200)), b"y" * 70_000]
    for frame in sent:
        pair.left.send_frame(pair.to_right, frame)
        pair.right.send_frame(pair.to_left, frame)
    left, right = pair.poll(lambda a, b: len(frames(a)) == len(frames(b)) == len(sent))
    assert frames(left) == frames(right) == sent


def test_connect_is_idempotent_per_address(pair: Pair) -> None:
    assert pair.left.connect(pair.right.address) == pair.to_right


def test_segment_crosses_between_lists_cut_differently(pair: Pair) -> None:
    source, target = Memory(16 * PIECE), Memory(16 * PIECE)
    for i in range(16):
        source.data[i * PIECE : (i + 1) * PIECE] = bytes([i + 1]) * PIECE
    order = [5, 3, 9, 14]
    quarters = [14, 2, 8, 40, 41, 1, 60, 33, 20, 21, 22, 23, 50, 11, 12, 13]
    sending = pair.left.send_segment(pair.to_right, 77 << 16, source.pieces(PIECE, order))
    receiving = pair.right.post_receive(pair.to_left, 77 << 16, target.pieces(PIECE // 4, quarters))
    left, right = pair.poll(lambda a, b: bool(a) and bool(b))
    assert left == [SegmentSent(sending)]
    assert right == [SegmentReceived(receiving)]
    got = b"".join(ctypes.string_at(*r) for r in target.pieces(PIECE // 4, quarters))
    assert got == b"".join(bytes([i + 1]) * PIECE for i in order)
    assert target.data[:512] == bytes(512), "memory outside the list was touched"


def test_segments_are_matched_by_tag_not_by_order(pair: Pair) -> None:
    ones, twos, target = Memory(PIECE, 1), Memory(PIECE, 2), Memory(2 * PIECE)
    pair.left.send_segment(pair.to_right, 1 << 16, ones.pieces(PIECE, [0]))
    pair.left.send_segment(pair.to_right, 2 << 16, twos.pieces(PIECE, [0]))
    pair.right.post_receive(pair.to_left, 2 << 16, target.pieces(PIECE, [0]))
    pair.right.post_receive(pair.to_left, 1 << 16, target.pieces(PIECE, [1]))
    pair.poll(lambda a, b: len(a) == len(b) == 2)
    assert target.data[0] == 2
    assert target.data[PIECE] == 1


@pytest.mark.parametrize("num_bytes", [64, PIECE])
def test_short_segment_is_an_error_not_a_success(pair: Pair, num_bytes: int) -> None:
    """A receive that got fewer bytes than it asked for leaves stale bytes behind."""
    source, target = Memory(PIECE), Memory(PIECE)
    pair.left.send_segment(pair.to_right, 9, [(source.base, num_bytes // 2)])
    pair.right.post_receive(pair.to_left, 9, [(target.base, num_bytes)])
    _, right = pair.poll(lambda _, b: bool(b))
    (event,) = right
    assert isinstance(event, SegmentReceived)
    assert event.error


def test_close_peer_ends_an_unmatched_receive_and_then_says_down(pair: Pair) -> None:
    """F40: UCX leaves a receive that no message met pending for ever."""
    target = Memory(PIECE)
    receiving = pair.right.post_receive(pair.to_left, 5, target.pieces(PIECE, [0]))
    pair.right.close_peer(pair.to_left, "test")
    _, right = pair.poll(lambda _, b: any(isinstance(e, PeerDown) for e in b))
    assert [type(event) for event in right] == [SegmentReceived, PeerDown]
    assert isinstance(right[0], SegmentReceived)
    assert right[0].operation == receiving
    assert right[0].error
    assert isinstance(right[1], PeerDown)
    assert right[1].peer == pair.to_left


def test_close_peer_ends_an_unmatched_send(pair: Pair) -> None:
    source = Memory(PIECE)
    pair.left.send_segment(pair.to_right, 5, source.pieces(PIECE, [0]))
    pair.left.close_peer(pair.to_right, "test")
    left, _ = pair.poll(lambda a, _: any(isinstance(e, PeerDown) for e in a))
    assert [type(event) for event in left] == [SegmentSent, PeerDown]


def test_a_closed_pair_connects_again(pair: Pair) -> None:
    """F19: one broken transfer must not spoil the pair for good."""
    pair.left.close_peer(pair.to_right, "test")
    pair.poll(lambda a, _: any(isinstance(e, PeerDown) for e in a))
    pair.right.close_peer(pair.to_left, "test")
    again = pair.left.connect(pair.right.address)
    assert again != pair.to_right
    pair.left.send_frame(again, b"back")
    pair.poll(lambda _, b: b"back" in frames(b))
    back = pair.right.connect(pair.left.address)
    pair.right.send_frame(back, b"welcome")
    pair.poll(lambda a, _: b"welcome" in frames(a))


@pytest.mark.parametrize("pair", ["inproc", "faulty", "ucx-tcp"], indirect=True)
def test_a_peer_that_closed_is_an_event(pair: Pair) -> None:
    """Over shared memory UCX looks at the peer's process alone: see tests/system."""
    pair.right.close()
    pair.left.send_frame(pair.to_right, b"anyone?")
    end = time.monotonic() + 5
    while not any(isinstance(event, PeerDown) for event in pair.left.poll(0.05)):
        assert time.monotonic() < end
        pair.left.send_frame(pair.to_right, b"anyone?")


def test_a_damaged_address_is_an_event(pair: Pair) -> None:
    peer = pair.left.connect(pair.right.address[:-1] + b"?")
    pair.left.send_frame(peer, b"lost")
    left, _ = pair.poll(lambda a, _: bool(a))
    assert [(type(event), getattr(event, "peer", 0)) for event in left] == [(PeerDown, peer)]


def test_wake_ends_a_sleeping_poll(pair: Pair) -> None:
    timer = threading.Timer(0.1, pair.left.wake)
    timer.start()
    start = time.monotonic()
    assert pair.left.poll(5.0) == []
    assert time.monotonic() - start < 2.0
    timer.join()


def test_waiting_costs_no_processor_time(pair: Pair) -> None:
    """F16: an idle engine with a receive pending must sleep."""
    target = Memory(PIECE)
    pair.right.post_receive(pair.to_left, 5, target.pieces(PIECE, [0]))
    for _ in range(50):
        pair.left.poll(0.001)
        pair.right.poll(0.001)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    assert pair.right.poll(0.5) == []
    after = resource.getrusage(resource.RUSAGE_THREAD)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.025, f"{used:.3f} s of half a second"


def test_close_is_idempotent(pair: Pair) -> None:
    pair.left.close()
    pair.left.close()
    pair.left.wake()


def test_ucx_leaves_the_environment_alone_and_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: UCX_TLS inherited from an outer MPI must not choose our wires."""
    monkeypatch.setenv("UCX_TLS", "posix,cma")
    before = dict(os.environ)
    memory = Memory(PIECE)
    settings = TransportSettings(tls="tcp,self", pool_address=memory.base, pool_bytes=PIECE)
    left, right = create_transport("ucx", settings), create_transport("ucx", settings)
    assert dict(os.environ) == before
    right.connect(left.address)
    peer = left.connect(right.address)
    left.send_frame(peer, b"hello")
    end = time.monotonic() + 5
    while b"hello" not in frames(right.poll(0.01)):
        left.poll(0.01)
        assert time.monotonic() < end
    assert left.describe() == "tcp"
    left.close()
    right.close()
