"""The sockets between a world's ranks and their owner, and between members and their leader."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import zmq

from executor.lane import LaneSpec
from executor.world.frames import RankDealer, open_dealer
from executor.world.messages import (
    STATUS_LINK,
    BeatAck,
    LaneOpened,
    OpenLane,
    RankBeat,
    ToOwner,
    ToRank,
)
from executor.world.rank_link import RankLink
from executor.world.status import StatusServer
from tests.support.frame_inlet import UNTIL_S, Inlet, Opened, Parts, recorded, until
from tests.support.led_members import KEY, SOCKETS, led_with_members

LANE = LaneSpec(frontend_id=3, key=bytes(32), requests_endpoint="a", results_endpoint="b")


@contextlib.contextmanager
def stranger(endpoint: str, curve_key: str) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_dealer(context, endpoint, curve_key, SOCKETS, 0)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def to_router(good: bytes, rank: bytes) -> tuple[Parts, ...]:
    return ([b""], [rank], [b"\xff\xff", good], [b"\0", good], [rank, good, b"more"])


class StatusPair:
    """The owner's end and a rank's, which opens whatever lane it is told to."""

    def __init__(self, endpoint: str) -> None:
        self.num_opened = 0
        self.server = StatusServer(
            endpoint, key=KEY, num_ranks=2, bounds=SOCKETS, on_message=self._on_rank
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server = self.server
        socket = open_dealer(self._context, server.endpoint, server.curve_key, SOCKETS, 0)
        dealer: RankDealer[ToRank] = RankDealer(socket, STATUS_LINK, KEY, 0, ToRank)
        self.up = recorded(dealer._sealer)
        self.down = recorded(server._router._sealers[0])
        self.link: RankLink[ToRank] = RankLink(
            "status-link",
            dealer,
            beat=RankBeat(),
            period_s=0.05,
            messages_max=64,
            on_message=self._on_owner,
        )
        self.link.start()

    async def probe(self) -> None:
        before = self.num_opened
        await until(lambda: self.server.send(0, OpenLane(LANE)))
        await until(lambda: self.num_opened > before)

    def close(self) -> None:
        self.link.close()
        self._context.term()
        self.server.close()

    def _on_rank(self, rank: int, message: ToOwner) -> None:
        match message:
            case LaneOpened():
                self.num_opened += 1
            case _:
                self.server.send(rank, BeatAck())

    def _on_owner(self, message: ToRank) -> None:
        if isinstance(message, OpenLane):
            self.link.say(LaneOpened(LANE.frontend_id, spec=message.spec))


@contextlib.asynccontextmanager
async def status_of_owner(endpoint: str) -> AsyncIterator[Inlet]:
    rank = bytes(2)
    with (
        contextlib.closing(StatusPair(endpoint)) as pair,
        stranger(pair.server.endpoint, pair.server.curve_key) as socket,
    ):
        yield Inlet(
            inject=socket.send_multipart,
            good=lambda: [rank, pair.up[0]],
            num_bad=lambda: pair.server.num_bad_frames,
            probe=pair.probe,
            strange=to_router(b"x" * 64, rank),
        )


@contextlib.asynccontextmanager
async def status_of_rank(endpoint: str) -> AsyncIterator[Inlet]:
    with contextlib.closing(StatusPair(endpoint)) as pair:
        router = pair.server._router
        yield Inlet(
            inject=lambda parts: router.socket.send_multipart([router._routes[0], *parts]),
            good=lambda: [pair.down[0]],
            num_bad=lambda: pair.link.num_bad_frames,
            probe=pair.probe,
            strange=([b"", b""], [b"x" * 64, b"y"]),
        )


@contextlib.asynccontextmanager
async def leader(endpoint: str) -> AsyncIterator[Inlet]:
    with led_with_members(endpoint, 2, members=1) as world:
        up = recorded(world.members[0]._link._dealer._sealer)
        rank = b"\1\0"
        with stranger(world.leader.endpoint, world.leader.curve_key) as socket:
            yield Inlet(
                inject=socket.send_multipart,
                good=lambda: [rank, up[0]],
                num_bad=lambda: world.leader.num_bad_frames,
                probe=partial(member_answers, world.leader),
                strange=to_router(b"x" * 64, rank),
            )


@contextlib.asynccontextmanager
async def member(endpoint: str) -> AsyncIterator[Inlet]:
    """Put on the wire by the thread that owns the leader's socket."""
    with led_with_members(endpoint, 2, members=1) as world:
        router, waiting = world.leader._router, deque[Parts]()
        down = recorded(router._sealers[1])
        send_outgoing = world.leader._send_outgoing

        def send_all() -> None:
            while waiting:
                router.socket.send_multipart([router._routes[1], *waiting.popleft()])
            send_outgoing()

        def inject(parts: Parts) -> None:
            waiting.append(parts)
            world.leader._wake()

        world.leader._send_outgoing = send_all  # type: ignore[method-assign]
        yield Inlet(
            inject=inject,
            good=lambda: [down[0]],
            num_bad=lambda: world.members[0]._link.num_bad_frames,
            probe=partial(member_answers, world.leader),
            strange=([b"", b""], [b"x" * 64, b"y"]),
        )


async def member_answers(leader: Any) -> None:
    call = leader.call_all("describe", {}, UNTIL_S)
    (answer,) = await asyncio.wait_for(asyncio.wrap_future(call), UNTIL_S)
    assert answer.error is None


RANK_SOCKETS: dict[str, Callable[[str], Opened]] = {
    "status-owner": status_of_owner,
    "status-rank": status_of_rank,
    "leader": leader,
    "member": member,
}
