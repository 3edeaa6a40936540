"""Frontends on one world, over ipc and over tcp: what they share, and who is kept out.

The world runs in threads of this process, with the real lanes, broker and links. Deaths of real
processes are in tests/contract/test_form_deaths.py and tests/system/test_frontends.py.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq

from executor.attach.broker import Broker
from executor.attach.caller import Caller, Place
from executor.attach.keys import UP, AttachKeys
from executor.attach.messages import PROTOCOL, Attach, Goodbye, Knock, key_head, pack
from executor.attach.point import AttachPoint
from executor.config import EngineConfig, ExecutorConfig, HealthConfig
from executor.executor import GenerationExecutor, GenerationResult
from executor.health import HealthBounds
from executor.limits import ExecutorLimits
from executor.proxy import Proxy
from executor.world.orders import ProcessName
from protos.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    RequestCancelledError,
    ServerUnavailableError,
)
from tests.support.attach_world import Rig, ThreadWorld, attached, open_broker, thread_world
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import (
    CONTRACT,
    CharTokenizer,
    audited,
    collect,
    config,
    expected,
    request,
    tokens,
)

SLOW = config(step_ms=20.0)
QUICK: dict[str, Any] = {"heartbeat_s": 0.1, "lane_silence_s": 0.5}


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(params=["attach", "rpc"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def rig(form: str) -> AsyncIterator[Rig]:
    async with thread_world(CONTRACT, form=form) as rig:
        yield rig


async def until(condition: object, within_s: float = 5.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - threads tell nobody
            await asyncio.sleep(0.01)


async def probe(executor: GenerationExecutor) -> None:
    """It still serves."""
    chunks = await collect(executor.submit(request("probe", max_tokens=5)))
    assert tokens(chunks) == expected((1, 2, 3), 5)


async def read_into(received: list[int], result: GenerationResult) -> None:
    async for chunk in result:
        received += chunk.token_ids


# --- together ----------------------------------------------------------------------


async def test_three_frontends_share_an_engine_and_each_hears_its_own(rig: Rig) -> None:
    async with attached(rig.point, 3) as fronts:
        prompts = {f"r{i}": (i, i + 1) for i in range(90)}
        results = {
            name: fronts[i % 3].submit(request(name, prompt, max_tokens=5))
            for i, (name, prompt) in enumerate(prompts.items())
        }
        for name, result in results.items():
            assert tokens(await collect(result)) == expected(prompts[name], 5)
        for front in fronts:
            await audited(front)
            assert front.form == rig.point.form
            assert front.worker_pids == (os.getpid(),)
    await until(lambda: len(rig.world.lanes) == 0)


async def test_a_frontend_has_text_workers_of_its_own(rig: Rig) -> None:
    """Rank 0 divides a step's answers by the buckets of each lane, one by one."""
    engine = EngineConfig(executor=ExecutorConfig(postprocess_workers=2))
    tokenizer = CharTokenizer()
    async with (
        attached(rig.point, engine=engine, tokenizer=tokenizer) as (with_workers,),
        attached(rig.point, tokenizer=tokenizer) as (without,),
    ):
        for front in (with_workers, without):
            results = [front.submit(request(f"t{i}", (i, 1), max_tokens=9)) for i in range(10)]
            for i, result in enumerate(results):
                chunks = await collect(result)
                text = "".join(chunk.text for chunk in chunks)
                assert text == tokenizer.decode(expected((i, 1), 9))


async def test_an_external_id_is_one_requests_across_frontends(rig: Rig) -> None:
    """Guards: two live requests of one name, of which Abort would find either."""
    async with attached(rig.point, 2) as (one, other):
        first = one.submit(request("same", max_tokens=5000))
        await anext(first)
        with pytest.raises(DuplicateRequestError):
            await collect(other.submit(request("same")))
        assert await other.abort_named("same")
        with pytest.raises(RequestCancelledError):
            await collect(first)
        assert not await other.abort_named("same")
        assert len(await collect(other.submit(request("same")))) > 0


async def test_one_that_leaves_takes_its_requests_along_and_nothing_else(rig: Rig) -> None:
    """Guards: an engine that works on for a frontend that is gone."""
    async with attached(rig.point) as (stays,):
        kept = stays.submit(request("kept", max_tokens=300))
        async with attached(rig.point) as (leaves,):
            for i in range(50):
                leaves.submit(request(f"gone{i}", max_tokens=2000))
            await until(lambda: rig.world.worker._ledger.entries_by_state()["streaming"] > 40)
        await until(lambda: len(rig.world.worker._ledger) <= 1)
        assert len(tokens(await collect(kept))) == 300
        await audited(stays)


async def test_frontends_come_and_go_and_nothing_grows(rig: Rig) -> None:
    """Guards: a frontend that leaves in the very moment in which rank 0 speaks to it."""

    async def visit(index: int) -> None:
        async with attached(rig.point) as (front,):
            results = [
                front.submit(request(f"{index}-{i}", (index, i), max_tokens=20 * i))
                for i in range(1, 6)
            ]
            for i, result in enumerate(results[: index % 6], 1):
                assert tokens(await collect(result)) == expected((index, i), 20 * i)

    async with attached(rig.point) as (stays,):
        for first in range(0, 45, 15):
            await asyncio.gather(*(visit(index) for index in range(first, first + 15)))
        await until(lambda: len(rig.world.lanes) == 1)
        await until(lambda: len(rig.world.worker._ledger) == 0)
        await audited(stays)
        assert rig.broker.counters()["attached"] == 46
        assert rig.broker.counters()["frontends"] == 1


async def test_rank_0_on_another_host_is_reached_over_tcp(form: str) -> None:
    """Its lanes are on tcp then, also for frontends that ask the broker over ipc."""
    elsewhere = ProcessName(1, 1, "127.0.0.1/boot/pids")
    async with (
        thread_world(CONTRACT, form=form, leader=elsewhere) as rig,
        attached(rig.point, 2) as fronts,
    ):
        for front in fronts:
            await probe(front)
            assert front.worker_pids == ()  # none that is here


async def test_a_new_frontend_has_a_new_number(rig: Rig) -> None:
    async with attached(rig.point) as (first,):
        pass
    async with attached(rig.point) as (second,):
        assert isinstance(first, Proxy)
        assert isinstance(second, Proxy)
        assert (first._link.frontend_id, second._link.frontend_id) == (1, 2)


# --- who is not let in -------------------------------------------------------------


async def test_whoever_has_another_key_hears_nothing_and_is_told_so_himself(rig: Rig) -> None:
    wrong = AttachPoint(
        form=rig.point.form,
        endpoint=rig.point.endpoint,
        keys=AttachKeys({rig.point.keys.first_id: b"x" * 32}),
        where=rig.point.where,
    )
    with pytest.raises(EngineDeadError, match=r"nobody answered|did not answer"):
        async with attached(wrong, hello_s_max=0.1):
            pass
    assert rig.broker.num_bad_frames > 0
    assert rig.broker.counters()["attached"] == 0
    async with attached(rig.point) as (front,):
        await probe(front)


class Stranger:
    """A DEALER of somebody who may have listened, but has no key."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def stranger(rig: Rig) -> Iterator[Stranger]:
    stranger = Stranger(rig.point.endpoint)
    yield stranger
    stranger.close()


async def test_frames_that_are_not_ours_are_counted_and_harm_nobody(
    rig: Rig, stranger: Stranger
) -> None:
    """Guards the broker: junk, half a frame, flipped bits, other keys, other directions."""
    key_id = rig.point.keys.first_id
    key, head = rig.point.keys.keys[key_id], key_head(key_id)
    good = pack(key, UP, head, Knock(PROTOCOL, b"n" * 16))
    bad: list[list[bytes]] = [
        [b""],
        [b"junk"],
        [head, b""],
        [head, good[:20]],
        [head, good[:-1]],
        [key_head("nobody"), good],
        [b"k\xff\xfe", good],
        [b"f\x01\x00", good],
        [b"f\x01", good],
        [head, pack(b"x" * 32, UP, head, Knock(PROTOCOL, b"n" * 16))],
        [head, pack(key, b"down:", head, Knock(PROTOCOL, b"n" * 16))],
        [head, pack(key, UP, head, Goodbye())],
        [head, good, b"more"],
        *([head, good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :]] for i in range(len(good))),
    ]
    for parts in bad:
        stranger.socket.send_multipart(parts)
    await until(lambda: rig.broker.num_bad_frames == len(bad))
    assert stranger.socket.poll(50) == 0  # not a word
    async with attached(rig.point) as (front,):
        await probe(front)


async def test_a_recorded_talk_opens_nothing(rig: Rig, stranger: Stranger) -> None:
    """Guards: replays from another connection, of a request that has served and of one that
    has not."""
    key_id = rig.point.keys.first_id
    key, head = rig.point.keys.keys[key_id], key_head(key_id)
    recorded: list[list[bytes]] = []
    caller = Caller(rig.point)
    send = caller._link.send

    def recording(parts: list[bytes]) -> bool:
        was_sent = send(parts)
        if was_sent:
            recorded.append(parts)
        return was_sent

    caller._link.send = recording  # type: ignore[method-assign]
    await caller.attach("x", ExecutorLimits(), lambda _: None)
    assert len(recorded) == 2
    for _ in range(3):
        for parts in recorded:
            stranger.socket.send_multipart(parts)
    unused = Attach(b"n" * 16, b"c" * 32, "x", ProcessName.own(), 1.0, 0)
    stranger.socket.send_multipart([head, pack(key, UP, head, unused)])
    await until(lambda: rig.broker.counters()["forged"] == 4)
    assert rig.broker.counters()["attached"] == 1
    await caller.leave()
    caller.close()


async def test_a_flood_is_dropped_and_others_are_served(rig: Rig, stranger: Stranger) -> None:
    """Guards invariant 11: what strangers send costs no memory and no turn of the loop."""
    async with attached(rig.point) as (front,):
        kept = front.submit(request("kept", max_tokens=100))
        for _ in range(20_000):
            try:
                stranger.socket.send_multipart([b"kk1", secrets.token_bytes(64)], zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0)
        assert len(tokens(await collect(kept))) == 100
        async with attached(rig.point) as (late,):
            await probe(late)
    assert rig.broker.num_bad_frames > 1000
    assert len(rig.broker._table) == 0


async def open_place(rig: Rig) -> tuple[Caller, Place]:
    caller = Caller(rig.point)
    return caller, await caller.attach("x", ExecutorLimits(), lambda _: None)


async def test_a_lane_takes_nothing_that_is_not_sealed_with_its_own_key(rig: Rig) -> None:
    """Guards the lane: another frontend's frames, junk and replays reach no request."""
    caller, place = await open_place(rig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    if place.curve_server_key:
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, place.curve_server_key)
    socket.connect(place.spec.requests_endpoint)
    before = rig.world.lanes.num_bad_frames
    for frame in (b"", b"junk", secrets.token_bytes(100), b"\0" * 500):
        socket.send(frame)
    await until(lambda: rig.world.lanes.num_bad_frames == before + 4)
    async with attached(rig.point) as (front,):
        await probe(front)
    socket.close()
    context.term()
    await caller.leave()
    caller.close()


async def test_over_tcp_a_stranger_cannot_take_a_lanes_place() -> None:
    """Guards: a PAIR has room for one; whoever connects first without a key must not have it."""
    async with thread_world(CONTRACT, form="rpc") as rig:
        caller, place = await open_place(rig)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        strangers = []
        for has_curve in (False, True):
            for endpoint in (place.spec.requests_endpoint, place.spec.results_endpoint):
                socket = context.socket(zmq.PAIR)
                socket.setsockopt(zmq.LINGER, 0)
                if has_curve:
                    public, secret = zmq.curve_keypair()
                    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_keypair()[0])
                socket.connect(endpoint)
                strangers.append(socket)
        await asyncio.sleep(0.2)
        from executor.attach.attached_link import AttachedLink

        bounds = ExecutorLimits()
        front = Proxy(
            lambda user: AttachedLink(caller, place, name="x", limits=bounds, user=user),
            tokenizer=None,
            limits=bounds,
        )
        await front.start(lambda _: None)
        await probe(front)
        await front.shutdown()
        for socket in strangers:
            socket.close()
        context.term()


# --- waiting -----------------------------------------------------------------------


async def test_whoever_comes_while_the_engine_loads_waits_and_is_told(form: str) -> None:
    bounds = ExecutorLimits()
    broker, point = open_broker(form, bounds)
    stages: list[str] = []
    create = asyncio.create_task(
        GenerationExecutor.create(EngineConfig(), name="x", progress=stages.append, point=point)
    )
    await until(lambda: stages)
    assert "the engine is loading" in stages[0]
    world = ThreadWorld(CONTRACT, bounds)
    broker.serve(world)
    executor = await create
    await probe(executor)
    await executor.shutdown()
    await asyncio.to_thread(world.close)
    await broker.close()


async def test_a_world_that_ends_is_told_with_its_cause(rig: Rig) -> None:
    """Over hosts there is no pidfd: the broker's word is the first that comes."""
    async with attached(rig.point, 3) as fronts:
        results = [
            front.submit(request(f"r{i}", max_tokens=8000)) for i, front in enumerate(fronts)
        ]
        rig.broker.world_ended("the worker was killed by SIGKILL")
        for front, result in zip(fronts, results, strict=True):
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await collect(result)
            with pytest.raises(EngineDeadError):
                front.check_health()
        with pytest.raises(EngineDeadError, match="has ended: the worker was killed"):
            async with attached(rig.point):
                pass


async def test_a_port_in_use_is_told() -> None:
    broker = Broker.on_tcp("127.0.0.1:0", AttachKeys({"k": b"k" * 32}), ExecutorLimits())
    with pytest.raises(ConfigError, match="address already in use"):
        Broker.on_tcp(f"127.0.0.1:{broker.port}", AttachKeys({"k": b"k" * 32}), ExecutorLimits())
    await broker.close()


async def test_a_world_that_beats_too_slowly_for_a_frontend_is_refused(rig: Rig) -> None:
    """Guards: a frontend that takes its world for silent between any two beats."""
    health = HealthConfig(silence_ms=1000, stall_ms=2000, give_up_ms=5000)
    with pytest.raises(ConfigError, match=r"silence_ms is 1000; .* must be at least 1200"):
        await GenerationExecutor.create(EngineConfig(health=health), name="x", point=rig.point)


# --- frontends that do not behave --------------------------------------------------


async def test_a_silent_frontend_loses_its_lane_and_others_go_on(form: str) -> None:
    async with thread_world(SLOW, form=form, **QUICK) as rig:
        tell_broker_of_closed_lanes(rig)
        async with attached(rig.point, 2, heartbeat_s=0.1) as (silent, other):
            assert isinstance(silent, Proxy)
            result = silent.submit(request("silent", max_tokens=8000))
            await anext(result)
            assert silent._tick_timer is not None
            silent._tick_timer.cancel()
            with pytest.raises(EngineDeadError, match=r"nothing was heard from it for 0\.5 s"):
                await collect(result)
            assert len(tokens(await collect(other.submit(request("o", max_tokens=5))))) == 5
            assert (await audited(other)).counters["worker_cancelled"] == 1
            await until(lambda: len(rig.broker._table) == 1)


def tell_broker_of_closed_lanes(rig: Rig) -> None:
    """As the owner of a real world does."""
    loop = asyncio.get_running_loop()

    def tell(frontend_id: int, _why: str) -> None:
        loop.call_soon_threadsafe(rig.broker.lane_closed, frontend_id)

    rig.world.lanes._on_closed = tell


async def test_lost_frames_end_the_frontend_and_are_told(rig: Rig) -> None:
    """Guards: a connection that broke and came back, and an answer that never comes."""
    async with attached(rig.point, 2) as (unlucky, other):
        assert isinstance(unlucky, Proxy)
        result = unlucky.submit(request("r", max_tokens=8000))
        received = list((await anext(result)).token_ids)
        unlucky._link.channel.opener._sequence -= 2  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="2 frames are lost"):
            await read_into(received, result)
        assert tuple(received) == expected((1, 2, 3), len(received))  # nothing behind the gap
        await until(lambda: len(rig.world.lanes) == 1)
        await probe(other)


async def test_frames_that_rank_0_never_got_end_the_lane(form: str) -> None:
    """Guards: a submit that was lost with its connection, and waits for its deadline."""
    async with (
        thread_world(SLOW, form=form, **QUICK) as rig,
        attached(rig.point, heartbeat_s=0.1) as (front,),
    ):
        assert isinstance(front, Proxy)
        result = front.submit(request("r", max_tokens=8000))
        await anext(result)
        front._link.requests._sender._sealer._sequence += 3  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="3 frames are lost"):
            await collect(result)


async def test_a_world_that_falls_silent_costs_the_open_requests_first(form: str) -> None:
    """The bound over hosts: silence_ms for what is open, give_up_ms for the engine."""
    health = HealthBounds(silence_s=0.5, stall_s=30.0, give_up_s=2.0)
    async with (
        thread_world(SLOW, form=form, heartbeat_s=0.1) as rig,
        attached(rig.point, health=health, heartbeat_s=0.1) as (front,),
    ):
        assert isinstance(front, Proxy)
        result = front.submit(request("r", max_tokens=8000))
        await anext(result)
        front._link.hold(True)  # not a word reaches us, as when the network is cut
        with pytest.raises(ServerUnavailableError, match="has said nothing"):
            await collect(result)
        with pytest.raises(ServerUnavailableError):
            front.submit(request("s"))
        cause = await asyncio.wait_for(front.wait_dead(), 10)
        assert "was given up by this frontend" in cause.message
        await until(lambda: len(rig.world.lanes) == 0)
