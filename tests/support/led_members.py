"""A leader with real members on threads of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from executor.config import EngineConfig, TransferConfig
from executor.engine.control import Method
from executor.world.frames import SocketBounds
from executor.world.leader import Leader
from executor.world.member import Member
from executor.world.messages import HelloAck
from executor.world.orders import Orders, ProcessName, RankBounds

KEY = bytes(range(32))
BYTES_MAX = 1 << 20
SOCKETS = SocketBounds(64, BYTES_MAX)
BOUNDS = RankBounds(
    heartbeat_s=0.05,
    owner_silence_s_max=5.0,
    hello_s_max=5.0,
    leave_s_max=5.0,
    queue_messages_max=64,
    message_bytes_max=BYTES_MAX,
    tombstones_max=16,
)


def orders(rank: int, num_ranks: int) -> Orders:
    return Orders(
        config=EngineConfig(engine="scripted", transfer=TransferConfig(transport="inproc")),
        name="test",
        rank=rank,
        num_ranks=num_ranks,
        key=KEY,
        status_endpoint="",
        leader_endpoint="",
        owner=ProcessName.own(),
        bounds=BOUNDS,
    )


@dataclass
class Led:
    leader: Leader
    members: list[Member]


@contextlib.contextmanager
def led(endpoint: str, num_ranks: int, *, members: int) -> Iterator[Leader]:
    """`members` of the `num_ranks - 1` really run."""
    with led_with_members(endpoint, num_ranks, members=members) as world:
        yield world.leader


@contextlib.contextmanager
def led_with_members(endpoint: str, num_ranks: int, *, members: int) -> Iterator[Led]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = Leader(context, endpoint, key=KEY, num_ranks=num_ranks, bounds=SOCKETS)
    leader.start()
    ack = HelloAck(leader.endpoint, leader.curve_key)
    joined = [Member(orders(i + 1, num_ranks), context, SOCKETS, ack) for i in range(members)]
    is_ready = threading.Barrier(members + 1)
    threads = [threading.Thread(target=run, args=(member, is_ready)) for member in joined]
    for thread in threads:
        thread.start()
    try:
        is_ready.wait(5.0)
        yield Led(leader, joined)
    finally:
        leader.stop_members()
        for thread in threads:
            thread.join(5.0)
        leader.close()
        context.term()
        assert not any(thread.is_alive() for thread in (*threads, leader))


def run(member: Member, is_ready: threading.Barrier) -> None:
    member.join()
    member.load()
    member._methods |= {
        "large": Method("large", lambda: "x" * BYTES_MAX),
        "strange": Method("strange", object),
    }
    is_ready.wait(5.0)
    assert member.serve()
    member.close()
