"""A world whose ranks are on other hosts: tcp and CURVE, silence for pidfds, words for exits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from executor.config import EngineConfig, ExecutorConfig, WorldConfig
from executor.engine.scripted_model import scripted_identity
from executor.health import HealthBounds
from executor.lane import LaneSpec
from executor.limits import ExecutorLimits
from executor.world.frames import SocketBounds, open_dealer
from executor.world.messages import CloseLane, HelloAck, RankHello
from executor.world.world import World
from protos.errors import (
    BatonError,
    ConfigError,
    EngineDeadError,
    OverloadedError,
    ServerUnavailableError,
)
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import config
from tests.support.far_ranks import FarLauncher, FarRank

HASTY = ExecutorLimits(
    heartbeat_s=0.05,
    call_s_max=0.3,
    health=HealthBounds(silence_s=0.3, stall_s=10.0, give_up_s=0.9),
    stop_dead_s_max=0.3,
)
LANE = LaneSpec(frontend_id=3, key=bytes(32), requests_endpoint="a", results_endpoint="b")
ALLOWANCE = 5


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def ranked(num_ranks: int) -> EngineConfig:
    world = WorldConfig(num_ranks=num_ranks)
    return msgspec.structs.replace(config(), executor=ExecutorConfig(world=world))


@contextlib.asynccontextmanager
async def far_world(num_ranks: int = 2, **more: Any) -> AsyncIterator[tuple[World, FarLauncher]]:
    launcher = FarLauncher(scripted_identity(config()))
    ended: list[EngineDeadError] = []
    world = World(
        ranked(num_ranks),
        name="far",
        limits=HASTY,
        launcher=launcher,
        on_dead=ended.append,
        **more,
    )
    try:
        assert await world.start(lambda _: None) == launcher.identity
        yield world, launcher
    finally:
        await world.stop()
        assert ended == [world.dead.result()]
        world.check()


async def welcomed(ranks: list[FarRank]) -> bool:
    return all([await asyncio.to_thread(rank.was_welcomed) for rank in ranks])


async def test_ranks_elsewhere_come_up_and_are_let_go() -> None:
    async with far_world(3) as (world, launcher):
        assert await welcomed(launcher.ranks)
        ack = HelloAck("tcp://far-away:1", "public")
        assert all(ack in rank.heard for rank in launcher.ranks)
        assert world.pids == ()
        assert world.leader.pid == 7
        assert launcher.ranks[0].orders.status_endpoint.startswith("tcp://")
        assert launcher.ranks[0].orders.status_curve_key
        started_at_s = time.monotonic()
        assert await world.stop() == ()
        assert time.monotonic() - started_at_s < HASTY.stop_dead_s_max * ALLOWANCE
        assert await world.stop() == ()
        assert "shut down" in world.dead.result().message


async def test_leave_is_given_once_all_are_done() -> None:
    async with far_world(2) as (_, launcher):
        ranks = launcher.ranks
    assert all(any(type(m).__name__ == "Leave" for m in rank.heard) for rank in ranks)


async def test_a_silent_host_is_trouble_first_dead_later_and_named_at_the_end() -> None:
    """Guards: a rank whose cable was pulled, and calls that wait for it for ever."""
    async with far_world(2) as (world, launcher):
        await asyncio.to_thread(launcher.ranks[1].fall_silent)
        silent_at_s = time.monotonic()
        await until(lambda: world.trouble)
        assert time.monotonic() - silent_at_s < HASTY.health.silence_s * ALLOWANCE
        assert world.trouble.startswith("rank 1 (process 8 on far-away) has said nothing for")
        error = await asyncio.wait_for(asyncio.shield(world.dead), ALLOWANCE)
        assert "rank 1 (process 8 on far-away) said nothing for 0.9 s" in error.message
        assert error.message.endswith("its last log lines:\n  its last line")
        assert launcher.num_kills == 2  # given up, and before it counts as dead
        leaks = await world.stop()
        assert leaks == (
            "rank 0 (process 7 on far-away) was not seen to end",
            "rank 1 (process 8 on far-away) was not seen to end",
        )


async def test_lanes_are_opened_by_rank_0() -> None:
    async with far_world() as (world, launcher):
        leader = launcher.ranks[0]
        spec = await world.open_lane(LANE)
        assert (spec.requests_endpoint, spec.frontend_id) == ("tcp://taken:2", 3)
        world.close_lane(3, "enough")
        leader.lane_error = OverloadedError("no more lanes")
        with pytest.raises(OverloadedError, match="no more lanes"):
            await world.open_lane(LANE)
        leader.lane_error, leader.answers_lanes = None, False
        with pytest.raises(ServerUnavailableError, match=r"did not open lane 3 within 0\.3 s"):
            await world.open_lane(LANE)
        assert CloseLane(3, "enough") in leader.heard
        waits = asyncio.create_task(world.open_lane(LANE))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await world.open_lane(LANE)
        world.give_up("enough")
        with pytest.raises(EngineDeadError, match="enough"):
            await waits
        await asyncio.shield(world.dead)
        with pytest.raises(EngineDeadError, match="enough"):
            await world.open_lane(LANE)


async def test_nobody_takes_a_ranks_place() -> None:
    """Guards: a stranger's frame, and a second process that claims a rank, which then gets its
    orders to stop or its lanes."""
    async with far_world() as (world, launcher):
        leader = launcher.ranks[0]
        claimant = FarRank(leader.orders, launcher.identity, pid=100)
        claimant.link.say(RankHello(claimant.process))
        stranger: zmq.Socket[bytes] = open_dealer(
            claimant.context,
            leader.orders.status_endpoint,
            leader.orders.status_curve_key,
            SocketBounds(8, 1 << 16),
            0,
        )
        for parts in ([b""], [b"\0\0", b"junk"], [b"\7\0", b"x" * 64], [b"a", b"b", b"c"]):
            stranger.send_multipart(parts)
        await until(lambda: world.num_bad_frames >= 4)
        stranger.close()
        await asyncio.to_thread(claimant.fall_silent)
        assert world.leader == leader.process
        await until_opened(world)


async def until(is_so: Any) -> None:
    ends_at_s = time.monotonic() + ALLOWANCE
    while not is_so():
        assert time.monotonic() < ends_at_s
        await asyncio.sleep(0.01)


async def until_opened(world: World) -> None:
    """The true rank's next beat shows the way back to it."""
    ends_at_s = time.monotonic() + ALLOWANCE
    while time.monotonic() < ends_at_s:
        with contextlib.suppress(ServerUnavailableError):
            assert (await world.open_lane(LANE)).requests_endpoint == "tcp://taken:2"
            return
    raise AssertionError("rank 0 cannot be reached any more")


async def test_a_world_from_which_nobody_is_ever_heard_is_given_up_in_time() -> None:
    """Guards: a bound that starts to count with the first HELLO."""
    launcher = FarLauncher(scripted_identity(config()))
    launcher.is_mute = True
    world = World(
        ranked(2),
        name="far",
        limits=dataclasses.replace(HASTY, hello_s_max=0.3),
        launcher=launcher,
        on_dead=lambda _: None,
    )
    with pytest.raises(EngineDeadError, match=r"rank 0, rank 1 did not start within 0\.3 s"):
        await asyncio.wait_for(world.start(lambda _: None), ALLOWANCE)
    assert launcher.num_kills == 1
    assert await world.stop() == ()


@pytest.mark.parametrize("refusal", [ConfigError("no place"), EngineDeadError("no cluster")])
async def test_a_launch_that_is_refused_leaves_nothing_to_wait_for(refusal: BatonError) -> None:
    launcher = FarLauncher(scripted_identity(config()), refusal)
    world = World(ranked(2), name="far", limits=HASTY, launcher=launcher, on_dead=lambda _: None)
    with pytest.raises(type(refusal), match=refusal.message):
        await world.start(lambda _: None)
    assert await world.stop() == ()
