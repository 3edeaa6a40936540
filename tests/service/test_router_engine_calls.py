"""What a router says where an engine is meant: that it has none, and how its servers' are.

Found by a newcomer: `baton engine sleep` of a router said "Unexpected <class
'NotImplementedError'>", and a server that slept was shown as down.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.security import create_secret
from protos import control_pb2 as pb
from protos.control_codec import server_info_from_proto
from protos.errors import ServerUnavailableError, UnsupportedError
from protos.status import error_from_rpc
from tests.support.router_client import Client, running_router
from tests.support.router_servers import scripted_pair

CALLS: list[tuple[str, Any]] = [
    ("Sleep", pb.SleepRequest()),
    ("WakeUp", pb.WakeUpRequest()),
    ("StartProfile", pb.StartProfileRequest(path="/tmp/x")),
    ("StopProfile", pb.StopProfileRequest()),
    ("LoadLora", pb.LoadLoraRequest(name="a", path="/b")),
    ("UnloadLora", pb.UnloadLoraRequest(name="a")),
    ("ListLoras", pb.ListLorasRequest()),
    ("SubscribeKvEvents", pb.SubscribeKvEventsRequest()),
    ("SubscribeStats", pb.SubscribeStatsRequest()),
]


async def test_a_router_has_no_engine_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = create_secret(file)
    async with scripted_pair(secret) as (context, generation):
        addresses = [context.address], [generation.address]
        async with running_router(file, *addresses) as client:
            for method, message in CALLS:
                error = await refusal(client, method, message)
                assert isinstance(error, UnsupportedError), method
                assert "name one context or generation server" in error.message


async def refusal(client: Client, method: str, message: Any) -> Exception:
    call = getattr(client.control, method)(message, metadata=client.metadata, timeout=5)
    answer = call.read() if method.startswith("Subscribe") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return error_from_rpc(caught.value)


async def test_a_sleeping_server_is_shown_asleep_and_takes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = create_secret(file)
    async with scripted_pair(secret) as (context, generation):
        addresses = [context.address], [generation.address]
        async with running_router(file, *addresses) as client:
            generation.state = "asleep"
            await shown(client, "asleep")
            answer = await client.generate()
            assert isinstance(answer.error, ServerUnavailableError)
            assert "asleep" in answer.error.message
            generation.state = "ready"
            await shown(client, "ready")
            assert (await client.generate()).error is None


async def shown(client: Client, state: str) -> None:
    """Until the router shows the generation server so, for some looks of its own at most."""
    for _ in range(200):
        answer = await client.control.GetServerInfo(
            pb.GetServerInfoRequest(), metadata=client.metadata, timeout=2
        )
        states = {each.role: each.state for each in server_info_from_proto(answer).servers}
        if states["generation"] == state:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never {state}: {states}")
