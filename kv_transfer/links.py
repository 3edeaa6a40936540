"""Which peers we talk to, and whether they still answer: pure but for the transport it drives.

A link is looked up by the incarnation in a frame, since the wire does not tell
who sent one. While a session lives on a link both sides ping; a link that says
nothing for `stall_s` is silent, whatever UCX believes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.events import TransferLimits
from kv_transfer.frames import Frame, Ping, encode
from kv_transfer.transport import Transport


@dataclass(slots=True)
class Link:
    peer: int
    heard_at: float
    pinged_at: float
    progress_at: float
    """When a segment last moved on this link; a queue that moves is no stall."""
    num_sessions: int = 0


class Links:
    def __init__(self, transport: Transport, incarnation: int, limits: TransferLimits) -> None:
        self._transport = transport
        self._incarnation = incarnation
        self._limits = limits
        self._by_peer: dict[int, Link] = {}
        self._by_incarnation: dict[int, Link] = {}

    def __len__(self) -> int:
        return len(self._by_peer)

    def open(self, address: bytes, incarnation: int, now: float) -> Link:
        """The link to this peer, made where there is none; counts one more session on it.

        A link may go by several incarnations, since a peer can be taken for its
        former life; whichever a frame bears, the link was heard of.
        """
        peer = self._transport.connect(address)
        link = self._by_peer.get(peer)
        if link is None:
            link = Link(peer, now, now, now)
            self._by_peer[peer] = link
        if not link.num_sessions:
            link.heard_at = link.pinged_at = link.progress_at = now
        self._by_incarnation[incarnation] = link
        link.num_sessions += 1
        return link

    def end_session(self, link: Link) -> None:
        assert link.num_sessions > 0, link
        link.num_sessions -= 1

    def of_sender(self, incarnation: int) -> Link | None:
        return self._by_incarnation.get(incarnation)

    def send(self, link: Link, frame: Frame) -> None:
        self._transport.send_frame(link.peer, encode(frame))

    def close(self, link: Link, cause: str) -> None:
        """Idempotent; the transport answers by the operations' ends and `PeerDown`."""
        self._transport.close_peer(link.peer, cause)

    def forget(self, peer: int) -> None:
        """The transport said PeerDown: the next use of that address makes a new link."""
        link = self._by_peer.pop(peer, None)
        for incarnation in [i for i, known in self._by_incarnation.items() if known is link]:
            del self._by_incarnation[incarnation]

    def ping_due(self, now: float) -> None:
        for link in self._by_peer.values():
            if link.num_sessions and now - link.pinged_at >= self._limits.heartbeat_s:
                link.pinged_at = now
                self.send(link, Ping(sender=self._incarnation))

    def is_silent(self, link: Link, now: float) -> bool:
        return now - link.heard_at >= self._limits.stall_s

    def excuse(self, now: float) -> None:
        """Our own thread was held up: what peers said meanwhile has not been read yet."""
        for link in self._by_peer.values():
            link.heard_at = link.progress_at = now

    def check(self) -> None:
        assert all(link.num_sessions >= 0 for link in self._by_peer.values())
