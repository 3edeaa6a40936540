"""Control frames off a UCX worker: of any length, whole, and in order per sender.

Frames travel as tagged messages of a kind of their own; the rest of the tag
names the sender. A long frame comes by rendezvous and takes several rounds of
progress, so it holds its sender's later frames back, and nobody else's.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass

from kv_transfer.transport import FRAME_BYTES_MAX, FrameReceived
from kv_transfer.ucx_binding import IN_PROGRESS, Ucp

CONTROL_KIND = 1 << 48
KIND_MASK = 0xFFFF << 48
_SENDER_MASK = (1 << 48) - 1
_FRAMES_PER_ROUND_MAX = 256


def control_tag(sender_digest: bytes) -> int:
    return CONTROL_KIND | int.from_bytes(sender_digest[:6], "little")


@dataclass(frozen=True, slots=True)
class _Receive:
    request: int
    buffer: ctypes.Array[ctypes.c_char]
    num_bytes: int


class FrameReader:
    def __init__(self, ucp: Ucp, worker: int) -> None:
        self._ucp = ucp
        self._worker = worker
        self._by_sender: dict[int, deque[_Receive]] = {}

    def read(self) -> list[FrameReceived]:
        """The frames that are complete; those of one sender in the order they were sent."""
        for _ in range(_FRAMES_PER_ROUND_MAX):
            if not self._begin_one():
                break
        arrived: list[FrameReceived] = []
        for sender in list(self._by_sender):
            arrived.extend(self._ended(sender))
        return arrived

    def _begin_one(self) -> bool:
        """A frame beyond the limit is received short, ends by an error and is dropped."""
        probed = self._ucp.probe(self._worker, CONTROL_KIND, KIND_MASK)
        if probed is None:
            return False
        message, tag, length = probed
        buffer = ctypes.create_string_buffer(min(max(length, 1), FRAME_BYTES_MAX))
        request = self._ucp.receive_probed(self._worker, message, buffer)
        if request > 0:
            receives = self._by_sender.setdefault(tag & _SENDER_MASK, deque())
            receives.append(_Receive(request, buffer, length))
        return True

    def _ended(self, sender: int) -> list[FrameReceived]:
        arrived: list[FrameReceived] = []
        receives = self._by_sender[sender]
        while receives:
            status = self._ucp.status(receives[0].request)
            if status == IN_PROGRESS:
                return arrived
            receive = receives.popleft()
            self._ucp.free(receive.request)
            if status == 0:
                arrived.append(FrameReceived(receive.buffer.raw[: receive.num_bytes]))
        del self._by_sender[sender]
        return arrived
