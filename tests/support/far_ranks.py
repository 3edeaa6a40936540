"""Ranks as they look from another host: real frames over tcp, a process that nobody here sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import zmq

from executor.engine.seam import EngineIdentity
from executor.world.frames import RankDealer, SocketBounds, open_dealer
from executor.world.launch import Exit, Launcher
from executor.world.messages import (
    STATUS_LINK,
    HelloAck,
    LaneOpened,
    Leave,
    OpenLane,
    RankBeat,
    RankDone,
    RankHello,
    RankJoined,
    RankReady,
    ReadyAck,
    StopRank,
    ToRank,
)
from executor.world.orders import Orders, ProcessName
from executor.world.rank_link import RankLink
from protos.errors import BatonError


class FarRank:
    """Says what it is told to; rank 0 answers for lanes, and stops its members."""

    def __init__(self, orders: Orders, identity: EngineIdentity, pid: int = 7) -> None:
        self.orders = orders
        self.identity = identity
        self.process = ProcessName(pid + orders.rank, 1, "far-away/boot/pids")
        self.lane_error: BatonError | None = None
        self.answers_lanes = True
        self.members: list[FarRank] = []
        self.heard: list[ToRank] = []
        bounds = SocketBounds(64, 1 << 20)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = open_dealer(
            self.context, orders.status_endpoint, orders.status_curve_key, bounds, 0
        )
        self.link: RankLink[ToRank] = RankLink(
            "far-rank",
            RankDealer(socket, STATUS_LINK, orders.key, orders.rank, ToRank),
            beat=RankBeat(),
            period_s=orders.bounds.heartbeat_s,
            messages_max=64,
            on_message=self._on_message,
        )
        self.link.start()

    def come_up(self) -> None:
        """Without waiting for acks: they are looked at later."""
        self.link.say(RankHello(self.process, "tcp://far-away:1", "public"))
        if self.orders.rank:
            self.link.say(RankJoined())
        self.link.say(RankReady(self.identity if self.orders.rank == 0 else None))

    def was_welcomed(self) -> bool:
        return all(self.link.wait_for(kind, 2.0) is not None for kind in (HelloAck, ReadyAck))

    def was_given_leave(self) -> bool:
        return self.link.wait_for(Leave, 2.0) is not None

    def fall_silent(self) -> None:
        """As if its host were gone."""
        self.link.close()
        self.context.term()

    def _on_message(self, message: ToRank) -> None:
        self.heard.append(message)
        match message:
            case StopRank():
                for rank in (self, *self.members):
                    rank.link.say(RankDone())
            case OpenLane() if self.answers_lanes and self.lane_error is None:
                taken = msgspec.structs.replace(message.spec, requests_endpoint="tcp://taken:2")
                self.link.say(LaneOpened(message.spec.frontend_id, spec=taken))
            case OpenLane() if self.lane_error is not None:
                data = self.lane_error.to_data()
                self.link.say(LaneOpened(message.spec.frontend_id, error=data))
            case _:
                pass


class FarLauncher(Launcher):
    """Starts threads here and sees nothing of them again."""

    name = "far"
    spans_hosts = True

    def __init__(self, identity: EngineIdentity, refusal: BatonError | None = None) -> None:
        self.identity = identity
        self.refusal = refusal
        self.ranks: list[FarRank] = []
        self.num_kills = 0
        self.is_mute = False

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.ranks = [FarRank(order, self.identity) for order in orders]
        self.ranks[0].members = self.ranks[1:]
        for rank in reversed(self.ranks):
            if not self.is_mute:
                rank.come_up()

    def exits(self) -> tuple[Exit, ...]:
        return ()

    def kill(self) -> None:
        self.num_kills += 1

    @property
    def log_lines(self) -> tuple[str, ...]:
        return ("its last line",)

    def close(self) -> None:
        for rank in self.ranks:
            if not rank.context.closed:
                rank.fall_silent()
