"""Every socket of the executor that reads, by its name: those of lanes, of attaching, of
postprocess workers, and (frame_ranks.py) of ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from executor.attach.caller import Caller
from executor.attach.keys import DOWN
from executor.attach.messages import WorldEnded, pack
from executor.channel import ProxyChannel
from executor.engine.seam import EngineRequest
from executor.limits import ExecutorLimits
from executor.messages import Outputs, Submit, ToProxy
from executor.post import worker as post_worker
from executor.post.messages import Answer, FromPost, Ready, Work, read_bootstrap
from executor.post.post_main import PostProcess
from executor.post.spec import TokenizerSpec
from executor.proxy import Proxy
from protos.messages import RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.attach_world import Rig, ThreadWorld, attached, thread_world
from tests.support.executor_scripted import collect, config, request, tokens
from tests.support.frame_inlet import Inlet, Opened, Parts, onto, recorded, until
from tests.support.frame_ranks import RANK_SOCKETS

TOY = TokenizerSpec(factory="tests.support.executor_scripted:CharTokenizer")

# --- lanes ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def attached_lane(way: str, form: str) -> AsyncIterator[Inlet]:
    async with thread_world(form=form) as rig, attached(rig.point) as (front,):
        assert isinstance(front, Proxy)
        link: Any = front._link
        lane = rig.world.lanes._lanes[link.frontend_id]

        async def probe() -> None:
            assert len(tokens(await collect(front.submit(request())))) == 4

        if way == "requests":
            sender = link.requests._sender
            inject, num_bad = onto(sender), partial(getattr, rig.world.lanes, "num_bad_frames")
        else:
            sender = lane.sender
            inject = onto(sender, rig.world.lanes._lock)
            num_bad = partial(getattr, link.channel.opener, "num_bad")
        frames = recorded(sender._sealer)
        yield Inlet(inject=inject, good=lambda: [frames[0]], num_bad=num_bad, probe=probe)


def engine_request(number: int) -> EngineRequest:
    return EngineRequest(
        request_id=number,
        request_type=RequestType.CONTEXT_AND_GENERATION,
        prompt_token_ids=pack_token_ids((1, 2)),
        sampling=SamplingParams(max_tokens=3, seed=1),
        deadline_s=30.0,
    )


@contextlib.asynccontextmanager
async def owners_lane(way: str, address: str) -> AsyncIterator[Inlet]:
    """Bound by the frontend, where a gap is the lane's end too."""
    limits = ExecutorLimits()
    heard: list[ToProxy] = []
    crashes: list[Exception] = []
    channel = ProxyChannel.local(
        limits, on_messages=heard.extend, on_crash=crashes.append, address=address
    )
    world = ThreadWorld(config(), limits)
    world.lanes.open(channel.spec)
    lane = world.lanes._lanes[channel.spec.frontend_id]
    numbers = itertools.count(1)

    def is_done(number: int) -> bool:
        outputs = (output for said in heard if isinstance(said, Outputs) for output in said.outputs)
        return any(output.request_id == number and output.finish for output in outputs)

    async def probe() -> None:
        number = next(numbers)
        channel.requests.put(Submit(engine_request(number), f"x{number}"))
        channel.requests.flush()
        await until(lambda: is_done(number))
        assert not crashes

    sender: Any = channel.requests._sender if way == "requests" else lane.sender
    opener = lane.opener if way == "requests" else channel.opener
    frames = recorded(sender._sealer)
    try:
        await until(channel.requests.is_connected)
        yield Inlet(
            inject=onto(sender, world.lanes._lock),
            good=lambda: [frames[0]],
            num_bad=lambda: opener.num_bad,
            probe=probe,
        )
    finally:
        await asyncio.to_thread(world.close)
        channel.close()


# --- attaching --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def broker(form: str) -> AsyncIterator[Inlet]:
    """By a stranger. The good frame is the request by which another was let in."""
    async with thread_world(form=form) as rig:
        caller = Caller(rig.point)
        sent = sendings(caller._link)
        await caller.attach("x", ExecutorLimits(), lambda _: None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(rig.point.endpoint)

        def num_bad() -> int:
            counters = rig.broker.counters()
            return sum(counters[kind] for kind in ("bad_frames", "forged", "replayed"))

        head, frame = sent[-1]
        try:
            yield Inlet(
                inject=socket.send_multipart,
                good=lambda: [head, frame],
                num_bad=num_bad,
                probe=partial(let_in_and_answered, rig),
                strange=([b""], [head], [b"kx", frame], [head, frame, b"more"]),
            )
            assert await caller.leave()
        finally:
            caller.close()
            socket.close(linger=0)
            context.term()


async def let_in_and_answered(rig: Rig) -> None:
    async with attached(rig.point) as (front,):
        assert len(tokens(await collect(front.submit(request())))) == 4


@contextlib.asynccontextmanager
async def caller(form: str) -> AsyncIterator[Inlet]:
    """By its broker. The good frame, which is never sent, would end the frontend's engine."""
    async with thread_world(form=form) as rig:
        sent = sendings(rig.broker._link)
        async with attached(rig.point) as (front,):
            assert isinstance(front, Proxy)
            link: Any = front._link
            ours = link._caller
            ((route, _, _),) = {parts[0]: parts for parts in sent}.values()
            fatal = [ours._head, pack(ours._key, DOWN, ours._head, WorldEnded("no"))]

            def inject(parts: Parts) -> None:
                assert rig.broker._link.send([route, *parts])

            async def probe() -> None:
                assert len(tokens(await collect(front.submit(request())))) == 4
                assert not ours.world_ended

            yield Inlet(
                inject=inject,
                good=lambda: fatal,
                replay=lambda: sent[1][1:],
                num_bad=lambda: link.counters()["bad_frames"],
                probe=probe,
                strange=([b""], fatal[:1], fatal[1:], [*fatal, b"more"]),
            )


def sendings(link: Any) -> list[Parts]:
    """What leaves by this socket from now on."""
    sent: list[Parts] = []
    send = link.send

    def recording(parts: Parts) -> bool:
        was_sent = bool(send(parts))
        if was_sent:
            sent.append(parts)
        return was_sent

    link.send = recording
    return sent


# --- postprocess workers ----------------------------------------------------------------


class PostThread:
    """Stands for the child process: the worker's own loop in a thread of this one."""

    def __init__(self, bootstrap: bytes, **_: Any) -> None:
        self.process = PostProcess(read_bootstrap(io.BytesIO(bootstrap)))
        self._thread = threading.Thread(target=self._run, name="post")
        self._thread.start()

    def close(self) -> None:
        self.process._context.term()  # once the thread, which hears of it, has closed its sockets
        self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.suppress(zmq.ContextTerminated):
                self.process.run()
        finally:
            self.process._receiver.socket.close(linger=0)
            self.process._sender.close()


@contextlib.asynccontextmanager
async def post(way: str) -> AsyncIterator[Inlet]:
    heard: list[FromPost] = []
    crashes: list[Exception] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post_worker, "WorkerChild", PostThread)
        worker = post_worker.PostWorker(
            context,
            TOY,
            name="test",
            limits=ExecutorLimits(),
            on_messages=heard.extend,
            on_crash=crashes.append,
            on_exit=lambda: None,
        )
    child: Any = worker._child
    await until(lambda: Ready() in heard)
    numbers = itertools.count(1)

    def is_answered(number: int) -> bool:
        return any(isinstance(said, Answer) and said.number == number for said in heard)

    async def probe() -> None:
        number = next(numbers)
        assert worker.send(Work(number, (), (), ()))
        await until(lambda: is_answered(number))
        assert not crashes

    sender = worker._sender if way == "works" else child.process._sender
    opener = child.process._opener if way == "works" else worker._opener
    frames = recorded(sender._sealer)
    try:
        yield Inlet(
            inject=onto(sender),
            good=lambda: [frames[0]],
            num_bad=lambda: opener.num_bad,
            probe=probe,
        )
    finally:
        worker.disconnect()
        await asyncio.to_thread(child.close)
        context.term()


# --- all --------------------------------------------------------------------------------

TCP = "127.0.0.1"
FORMS = {"ipc": "attach", "tcp": "rpc"}


def inlets(folder: Path) -> dict[str, Callable[[], Opened]]:
    """By name; `folder` is for socket files."""
    found: dict[str, Callable[[], Opened]] = {}
    for wire, form in FORMS.items():
        for way in ("requests", "results"):
            found[f"attached-{way}-{wire}"] = partial(attached_lane, way, form)
            found[f"owner-{way}-{wire}"] = partial(owners_lane, way, "" if wire == "ipc" else TCP)
        found[f"broker-{wire}"] = partial(broker, form)
        found[f"caller-{wire}"] = partial(caller, form)
        endpoint = f"ipc://{folder}/s" if wire == "ipc" else f"tcp://{TCP}:*"
        for name, opened in RANK_SOCKETS.items():
            found[f"{name}-{wire}"] = partial(opened, endpoint)
    for way in ("works", "answers"):
        found[f"post-{way}-ipc"] = partial(post, way)
    return found


NAMES = tuple(inlets(Path()))
