"""A transport that misbehaves as told: wraps another and breaks the contract on purpose.

Rules are tried in order for each frame or segment that is sent; the first that
fits acts. A rule fits the nth message that it sees, or by chance with a seeded
generator, so that a run repeats exactly. Nothing here is used in production.

    drop       the message never leaves; a segment's send then never ends
    delay      it leaves at the nth poll after
    duplicate  a frame leaves twice
    reorder    a frame leaves after the next one to the same peer
    corrupt    one byte is flipped
    stall      from here on nothing leaves for this peer: a half-open connection
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kv_transfer.transport import PeerDown, Region, SegmentSent, Transport, TransportEvent

Fault = Literal["drop", "delay", "duplicate", "reorder", "corrupt", "stall"]


@dataclass(slots=True)
class FaultRule:
    """`frame_tag` limits a frame rule to one kind of frame (e.g. "ack"); `times` to so many."""

    fault: Fault
    on: Literal["frame", "segment"] = "frame"
    frame_tag: str = ""
    skip: int = 0
    times: int = 1 << 30
    probability: float = 1.0
    delay_polls: int = 3

    def fits(self, kind: str, frame: bytes, chance: random.Random) -> bool:
        if kind != self.on or not self.times:
            return False
        if self.frame_tag and self.frame_tag.encode() not in frame[:16]:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if chance.random() >= self.probability:
            return False
        self.times -= 1
        return True


class FaultyTransport:
    """Behaves as `inner` where no rule fits."""

    def __init__(self, inner: Transport, rules: Sequence[FaultRule] = (), seed: int = 0) -> None:
        self.name = inner.name
        self.rules = list(rules)
        self._inner = inner
        self._chance = random.Random(seed)  # noqa: S311 - a repeatable test, no secret
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._held: dict[int, bytes] = {}
        self._stalled: dict[int, bool] = {}
        self._numbers: dict[int, int] = {}
        """Inner operation to the number that we gave out, where they differ."""
        self._lost_sends: dict[int, int] = {}
        self._copies: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._next_number = -1
        self._delay_polls = 0

    @property
    def address(self) -> bytes:
        return self._inner.address

    def connect(self, address: bytes) -> int:
        return self._inner.connect(address)

    def send_frame(self, peer: int, frame: bytes) -> None:
        match self._fault("frame", peer, frame):
            case "drop" | "stall":
                return
            case "delay":
                self._later(lambda: self._inner.send_frame(peer, frame))
                return
            case "reorder":
                self._held[peer] = frame
                return
            case "duplicate":
                self._inner.send_frame(peer, frame)
            case "corrupt":
                frame = _flip(frame)
            case _:
                pass
        self._inner.send_frame(peer, frame)
        held = self._held.pop(peer, None)
        if held is not None:
            self._inner.send_frame(peer, held)

    def send_segment(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        match self._fault("segment", peer, b""):
            case "drop" | "stall" | "reorder":
                number = self._mint()
                self._lost_sends[number] = peer
                return number
            case "delay":
                number = self._mint()
                self._lost_sends[number] = peer
                self._later(lambda: self._send_late(number, peer, tag, regions))
                return number
            case "corrupt":
                data = _flip(b"".join(ctypes.string_at(*region) for region in regions))
                copy = (ctypes.c_char * len(data)).from_buffer_copy(data)
                number = self._inner.send_segment(peer, tag, [(ctypes.addressof(copy), len(data))])
                self._copies[number] = copy
                return number
            case _:
                return self._inner.send_segment(peer, tag, regions)

    def post_receive(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        return self._inner.post_receive(peer, tag, regions)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        due = [act for polls, act in self._late if polls <= 0]
        self._late = [(polls - 1, act) for polls, act in self._late if polls > 0]
        for act in due:
            act()
        answer: list[TransportEvent] = []
        for event in self._inner.poll(min(timeout_s, 0.01) if self._late else timeout_s):
            if isinstance(event, PeerDown):
                answer.extend(self._ended_sends(event))
            answer.append(self._renumbered(event))
        return answer

    def wake(self) -> None:
        self._inner.wake()

    def close_peer(self, peer: int, cause: str) -> None:
        self._held.pop(peer, None)
        self._inner.close_peer(peer, cause)

    def close(self) -> None:
        self._late.clear()
        self._inner.close()

    def describe(self) -> str:
        return self._inner.describe()

    def _fault(self, kind: str, peer: int, frame: bytes) -> str:
        if self._stalled.get(peer):
            return "stall"
        for rule in self.rules:
            if rule.fits(kind, frame, self._chance):
                if rule.fault == "stall":
                    self._stalled[peer] = True
                if rule.fault == "delay":
                    self._delay_polls = rule.delay_polls
                return rule.fault
        return ""

    def _later(self, act: Callable[[], None]) -> None:
        self._late.append((self._delay_polls, act))

    def _mint(self) -> int:
        self._next_number -= 1
        return self._next_number

    def _send_late(self, number: int, peer: int, tag: int, regions: Sequence[Region]) -> None:
        if self._lost_sends.pop(number, None) is not None:
            self._numbers[self._inner.send_segment(peer, tag, regions)] = number

    def _renumbered(self, event: TransportEvent) -> TransportEvent:
        if isinstance(event, SegmentSent):
            self._copies.pop(event.operation, None)
            number = self._numbers.pop(event.operation, event.operation)
            return SegmentSent(number, event.error)
        return event

    def _ended_sends(self, down: PeerDown) -> list[SegmentSent]:
        """A dropped send ends when its peer goes down, as the contract wants."""
        ended = [number for number, peer in self._lost_sends.items() if peer == down.peer]
        for number in ended:
            del self._lost_sends[number]
        return [SegmentSent(number, down.cause) for number in ended]


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x5A]) + data[middle + 1 :]
