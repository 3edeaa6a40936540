"""A transport inside one process: threads stand in for engines, memmove for the wire.

All state lies in an `InprocNetwork` that the transports of one test or process
share; one lock guards it, held also while a segment is copied, so that a closed
peer's memory is never touched afterwards. A link joins two transports; it goes
down for both ends at once.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.transport import (
    FRAME_BYTES_MAX,
    FrameReceived,
    PeerDown,
    Region,
    SegmentReceived,
    SegmentSent,
    TransportEvent,
)
from protos.errors import InternalError

INBOX_MAX = 65_536


@dataclass(slots=True)
class _Operation:
    number: int
    owner: InprocTransport
    other: bytes
    tag: int
    regions: tuple[Region, ...]


@dataclass(slots=True)
class InprocNetwork:
    """Who can be reached under which address, and what waits for its counterpart."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    transports: dict[bytes, InprocTransport] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


class InprocTransport:
    """See kv_transfer.transport for the contract."""

    name = "inproc"

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._ready = threading.Condition(network.lock)
        self._inbox: deque[TransportEvent] = deque()
        self._is_woken = False
        self._is_closed = False
        self._peers: dict[int, bytes] = {}
        self._sends: dict[int, _Operation] = {}
        """Our sends that no receive has met yet, by operation."""
        self._receives: dict[int, _Operation] = {}
        with network.lock:
            self._address = b"inproc:%d" % next(network.numbers)
            network.transports[self._address] = self

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, address: bytes) -> int:
        with self._network.lock:
            for peer, known in self._peers.items():
                if known == address:
                    return peer
            peer = next(self._network.numbers)
            self._peers[peer] = address
            if address not in self._network.transports:
                self._drop_peer(peer, "nobody listens at this address")
            return peer

    def send_frame(self, peer: int, frame: bytes) -> None:
        assert len(frame) <= FRAME_BYTES_MAX, len(frame)
        with self._network.lock:
            other = self._other(peer)
            if other is not None:
                other._put(FrameReceived(frame))

    def send_segment(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        with self._network.lock:
            operation = self._operation(peer, tag, regions)
            other = self._other(peer)
            if other is None:
                self._put(SegmentSent(operation.number, "the peer is down"))
                return operation.number
            self._sends[operation.number] = operation
            waiting = _match(other._receives, tag, self._address)
            if waiting is not None:
                _copy(operation, waiting)
            return operation.number

    def post_receive(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        with self._network.lock:
            operation = self._operation(peer, tag, regions)
            other = self._other(peer)
            if other is None:
                self._put(SegmentReceived(operation.number, "the peer is down"))
                return operation.number
            self._receives[operation.number] = operation
            waiting = _match(other._sends, tag, self._address)
            if waiting is not None:
                _copy(waiting, operation)
            return operation.number

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        end = time.monotonic() + timeout_s
        with self._network.lock:
            while not self._inbox and not self._is_woken:
                left = end - time.monotonic()
                if left <= 0 or not self._ready.wait(left):
                    break
            self._is_woken = False
            events = list(self._inbox)
            self._inbox.clear()
            return events

    def wake(self) -> None:
        with self._network.lock:
            self._is_woken = True
            self._ready.notify_all()

    def close_peer(self, peer: int, cause: str) -> None:
        with self._network.lock:
            self._close_peer(peer, cause)

    def close(self) -> None:
        with self._network.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._network.transports.pop(self._address, None)
            for peer in list(self._peers):
                self._close_peer(peer, "closed")
            for other in list(self._network.transports.values()):
                other._drop_address(self._address, "the peer closed")

    def describe(self) -> str:
        return "inproc"

    def _operation(self, peer: int, tag: int, regions: Sequence[Region]) -> _Operation:
        other = self._peers.get(peer, b"")
        return _Operation(next(self._network.numbers), self, other, tag, tuple(regions))

    def _other(self, peer: int) -> InprocTransport | None:
        address = self._peers.get(peer)
        return None if address is None else self._network.transports.get(address)

    def _close_peer(self, peer: int, cause: str) -> None:
        address = self._peers.get(peer)
        if address is None:
            return
        self._drop_peer(peer, cause)
        other = self._network.transports.get(address)
        if other is not None:
            other._drop_address(self._address, "the peer closed the connection")

    def _drop_address(self, address: bytes, cause: str) -> None:
        for peer in [peer for peer, known in self._peers.items() if known == address]:
            self._drop_peer(peer, cause)

    def _drop_peer(self, peer: int, cause: str) -> None:
        address = self._peers.pop(peer)
        for number in [n for n, o in self._sends.items() if o.other == address]:
            del self._sends[number]
            self._put(SegmentSent(number, cause))
        for number in [n for n, o in self._receives.items() if o.other == address]:
            del self._receives[number]
            self._put(SegmentReceived(number, cause))
        self._put(PeerDown(peer, cause))

    def _put(self, event: TransportEvent) -> None:
        if len(self._inbox) >= INBOX_MAX:
            raise InternalError(f"an inproc inbox holds {INBOX_MAX} events: its owner stopped")
        self._inbox.append(event)
        self._ready.notify_all()


def _match(operations: dict[int, _Operation], tag: int, address: bytes) -> _Operation | None:
    for operation in operations.values():
        if operation.tag == tag and operation.other == address:
            return operation
    return None


def _copy(send: _Operation, receive: _Operation) -> None:
    del send.owner._sends[send.number]
    del receive.owner._receives[receive.number]
    num_sent = sum(length for _, length in send.regions)
    num_expected = sum(length for _, length in receive.regions)
    error = ""
    if num_sent == num_expected:
        _scatter(send.regions, receive.regions)
    else:
        error = f"{num_sent} bytes were sent, {num_expected} expected"
    send.owner._put(SegmentSent(send.number))
    receive.owner._put(SegmentReceived(receive.number, error))


def _scatter(sources: tuple[Region, ...], targets: tuple[Region, ...]) -> None:
    """Copy between two lists that are cut differently but of one total."""
    waiting = deque(targets)
    for source, left in sources:
        while left:
            target, room = waiting.popleft()
            count = min(left, room)
            ctypes.memmove(target, source, count)
            source, left = source + count, left - count
            if room > count:
                waiting.appendleft((target + count, room - count))
