"""What the router does with a server that answers, but whose engine does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.logs import Logs
from common.security import create_secret
from protos.control_codec import load_to_proto, model_info_to_proto, server_info_to_proto
from protos.errors import ServerUnavailableError
from protos.messages import Load, ModelInfo, ServerInfo
from router.fleet import Fleet
from router.policies import create_policy
from router.watch import Watcher
from tests.support.router_client import Client, assert_at_rest, collect, running_router, until
from tests.support.router_servers import LAYOUT, LIMITS, ScriptedServer, completion

PROMPT = (5, 6, 7, 8)
ALLOWANCE = 5


@dataclass
class Pool:
    client: Client
    context: ScriptedServer
    generation: list[ScriptedServer] = field(default_factory=list)


@asynccontextmanager
async def two_generation_servers(folder: Path, **settings: Any) -> AsyncIterator[Pool]:
    file = folder / "secret"
    secret = create_secret(file)
    context = ScriptedServer("context", secret)
    generation = [
        ScriptedServer("generation", secret, name=f"generation-{index}", incarnation=2 + index)
        for index in range(2)
    ]
    servers = [context, *generation]
    for server in servers:
        await server.start()
    for server in generation:
        server.pullers = [context]
    addresses = [server.address for server in generation]
    try:
        async with running_router(file, [context.address], addresses, **settings) as client:
            await until(lambda: all(s.is_up for s in client.router.fleet.servers), "all to be up")
            yield Pool(client, context, generation)
            await assert_at_rest(client, *servers)
    finally:
        for server in servers:
            await server.stop()


async def test_a_stalled_server_loses_its_legs_at_once_and_the_others_serve(
    tmp_path: Path,
) -> None:
    """Guards streams left open on a server that says itself that nothing will come, and
    requests still sent there; a stop must not be taken for a stall."""
    async with two_generation_servers(tmp_path) as pool:
        client = pool.client
        for server in pool.generation:
            server.script.hang_at = 2
        calls = [client.start(PROMPT, max_tokens=6) for _ in range(2)]
        for call in calls:
            await call.read()
        await until(lambda: all(s.num_open == 1 for s in pool.generation), "a leg on each")
        stalled, other = pool.generation
        other.state = "draining"
        stalled.state = "stalled"
        began_s = time.monotonic()
        ended = [asyncio.ensure_future(collect(call)) for call in calls]
        done, pending = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert time.monotonic() - began_s < ALLOWANCE * 0.2
        error = done.pop().result().error
        assert isinstance(error, ServerUnavailableError)
        assert stalled.name in error.message
        assert "stalled" in error.message
        await asyncio.sleep(0.3)
        assert other.num_open == 1  # it drains: what it has taken goes on
        pending.pop().cancel()
        other.state = "ready"
        for server in pool.generation:
            server.script.hang_at = None
        await until(lambda: client.router.fleet.server(other.address).is_up, "the other")
        num_before = len(stalled.seen.requests)
        for _ in range(4):
            answer = await client.generate(PROMPT, max_tokens=3)
            assert answer.token_ids == completion(PROMPT, 3)[0]
        assert len(stalled.seen.requests) == num_before
        stalled.state = "ready"
        await until(lambda: client.router.fleet.server(stalled.address).is_up, "its return")


async def test_a_told_unavailable_takes_the_server_out_until_looked_at(tmp_path: Path) -> None:
    """Guards the requests between a stall and the next heartbeat, which would all fail."""
    async with two_generation_servers(tmp_path, heartbeat_s=30.0) as pool:
        broken = pool.generation[0]
        broken.script.fail_at, broken.script.error = 1, ServerUnavailableError("said nothing")
        broken.state = "stalled"
        answers = [await pool.client.generate(PROMPT, max_tokens=3) for _ in range(6)]
        errors = [answer.error for answer in answers]
        assert isinstance(errors[0], ServerUnavailableError)
        assert errors[1:] == [None] * 5
        assert len(broken.seen.requests) == 1


# --- a load that does not come ------------------------------------------------------


class Late(grpc.aio.AioRpcError):
    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "late")


class Control:
    """A control stub whose load is late as often as it is told."""

    def __init__(self) -> None:
        self.num_late = 0
        self.timeouts_s: list[float] = []

    async def GetServerInfo(self, *_: Any, **__: Any) -> Any:
        return server_info_to_proto(
            ServerInfo(
                name="g",
                role="generation",
                incarnation=1,
                version="test",
                model=LIMITS.model,
                layout=LAYOUT,
                transport="inproc",
                state="ready",
            )
        )

    async def GetModelInfo(self, *_: Any, **__: Any) -> Any:
        return model_info_to_proto(
            ModelInfo(limits=LIMITS, dtype="float32", num_parameters=1, architecture="x")
        )

    async def GetLoad(self, *_: Any, timeout: float, **__: Any) -> Any:
        self.timeouts_s.append(timeout)
        if self.num_late:
            self.num_late -= 1
            raise Late
        return load_to_proto(Load())


class Link:
    address = "127.0.0.1:1"
    metadata = ()

    def __init__(self) -> None:
        self.control = Control()


async def test_late_loads_say_nothing_of_a_server_that_is_ready() -> None:
    """An engine tells its load between two steps. A large model's step is long, and a router
    that took two late loads for silence ended every request of a healthy server."""
    link: Any = Link()
    fleet = Fleet(
        [],
        [link.address],
        context_policy=create_policy("round_robin"),
        generation_policy=create_policy("round_robin"),
        needs_pairs=False,
    )
    silent: list[str] = []

    async def on_change() -> None:
        pass

    watcher = Watcher(
        link,
        fleet,
        heartbeat_s=1.0,
        heartbeat_timeout_s=3.0,
        on_change=on_change,
        on_silent=lambda _, reason: silent.append(reason),
        log=Logs(name="test", level="error").get("fleet"),
    )
    ups: list[bool] = []
    for num_late in (1, 1, 1, 1, 0):
        link.control.num_late = num_late
        await watcher._probe()
        ups.append(fleet.server(link.address).is_up)
        fleet.check()
    assert ups == [True] * 5
    assert silent == []
    assert link.control.timeouts_s == [1.0] * 5, "it waits no longer than a heartbeat"


@pytest.mark.parametrize("state", ["starting", "dead"])
async def test_a_server_that_lost_its_engine_loses_its_legs(state: str, tmp_path: Path) -> None:
    async with two_generation_servers(tmp_path) as pool:
        for server in pool.generation:
            server.script.hang_at = 2
        call = pool.client.start(PROMPT, max_tokens=6)
        await call.read()
        await until(lambda: any(s.num_open for s in pool.generation), "the leg")
        for server in pool.generation:
            server.state = state
        answer = await asyncio.wait_for(collect(call), ALLOWANCE * 0.2)
        assert isinstance(answer.error, ServerUnavailableError)
