"""Control calls that concern the engine, through gRPC, over the scripted engine's worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from context_server.service import ContextRole
from executor.config import EngineConfig, ScriptedConfig
from protos import control_pb2 as pb
from protos import inference_pb2 as ipb
from protos.status import error_from_rpc
from protos.tokens import pack_token_ids
from serving.run import ServerProcess
from tests.support.cli_up import baton
from tests.support.serving_double import RunningServer, running_server

ENGINE = EngineConfig(engine="scripted", scripted=ScriptedConfig(step_ms=2))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with running_server(
        ContextRole, tmp_path, process_type=ServerProcess, engine=ENGINE
    ) as server:
        yield server


def request(max_tokens: int = 5) -> ipb.GenerateRequest:
    return ipb.GenerateRequest(
        token_ids=pack_token_ids(tuple(range(40))),
        request_type=ipb.REQUEST_TYPE_CONTEXT_AND_GENERATION,
        sampling=ipb.SamplingParams(max_tokens=max_tokens, seed=1),
    )


async def generate(server: RunningServer, **keys: Any) -> list[int]:
    stream = server.inference.Generate(request(**keys))
    return [token async for message in stream for token in message.token_ids]


async def test_sleep_refuses_wakes_and_needs_the_key(server: RunningServer) -> None:
    before = await generate(server)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await server.control.Sleep(pb.SleepRequest())
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await server.control.Sleep(pb.SleepRequest(), metadata=server.metadata)
    with pytest.raises(grpc.aio.AioRpcError) as asleep:
        await generate(server)
    assert asleep.value.code() is grpc.StatusCode.UNAVAILABLE  # a router goes elsewhere
    assert "asleep" in str(error_from_rpc(asleep.value))
    info = await server.control.GetServerInfo(pb.GetServerInfoRequest(), metadata=server.metadata)
    assert info.state == "asleep"
    await server.control.WakeUp(pb.WakeUpRequest(), metadata=server.metadata)
    assert await generate(server) == before


async def test_a_profile_is_written_where_it_was_asked(
    server: RunningServer, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    asked = pb.StartProfileRequest(path=str(path))
    await server.control.StartProfile(asked, metadata=server.metadata)
    await generate(server)
    answer = await server.control.StopProfile(pb.StopProfileRequest(), metadata=server.metadata)
    (file,) = answer.files
    assert file.path == str(path)
    assert file.num_bytes == path.stat().st_size
    assert json.loads(path.read_text())["traceEvents"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await server.control.StopProfile(pb.StopProfileRequest(), metadata=server.metadata)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_lora_adapters_are_listed_and_gone(server: RunningServer) -> None:
    control, metadata = server.control, server.metadata
    await control.LoadLora(pb.LoadLoraRequest(name="a", path="/x"), metadata=metadata)
    listed = await control.ListLoras(pb.ListLorasRequest(), metadata=metadata)
    assert [(lora.name, lora.path) for lora in listed.loras] == [("a", "/x")]
    await control.UnloadLora(pb.UnloadLoraRequest(name="a"), metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await control.UnloadLora(pb.UnloadLoraRequest(name="a"), metadata=metadata)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_kv_events_and_statistics_stream_until_the_caller_goes(
    server: RunningServer,
) -> None:
    """Guards: events built for nobody, or a subscription that outlives its caller."""
    kv_events = server.control.SubscribeKvEvents(
        pb.SubscribeKvEventsRequest(), metadata=server.metadata
    )
    first = await kv_events.read()
    assert first.HasField("snapshot")
    steps = server.control.SubscribeStats(pb.SubscribeStatsRequest(), metadata=server.metadata)
    await steps.initial_metadata()
    await generate(server, max_tokens=40)
    indexes = [(await steps.read()).step_index for _ in range(5)]
    assert indexes == sorted(indexes)
    event = (await asyncio.wait_for(kv_events.read(), 10)).events[0]
    assert event.sequence > first.snapshot.sequence
    assert event.stored.block_hashes
    kv_events.cancel()
    steps.cancel()
    built = await eventually_constant(server)
    await generate(server)
    assert await counters(server) == built


async def counters(server: RunningServer) -> tuple[int, int]:
    ledger = await server.control.GetLedger(pb.GetLedgerRequest(), metadata=server.metadata)
    return ledger.counters["engine_stats_built"], ledger.counters["engine_kv_events_built"]


async def eventually_constant(server: RunningServer) -> tuple[int, int]:
    """The counters once the server has noticed that its listeners are gone."""
    for _ in range(50):
        before = await counters(server)
        await generate(server)
        if await counters(server) == before:
            return before
        await asyncio.sleep(0.1)
    raise AssertionError("the engine still builds what nobody reads")


async def test_the_operators_commands_reach_the_engine(
    server: RunningServer, tmp_path: Path
) -> None:
    at = ("--server", server.process.state.address, "--secret-file", str(tmp_path / "secret"))
    trace = tmp_path / "cli.json"
    said = [
        (await asyncio.to_thread(baton, "engine", *words, *at)).stdout
        for words in (
            ("load-lora", "a", "/x"),
            ("loras",),
            ("unload-lora", "a"),
            ("profile", str(trace), "--seconds", "0"),
            ("sleep",),
            ("wake-up",),
        )
    ]
    assert said[:3] == ["loaded a\n", "a\t/x\n", "unloaded a\n"]
    assert said[3].startswith(f"{trace}: ")
    assert said[3].endswith(f" steps, {trace.stat().st_size} bytes\n")
    assert said[4:] == ["asleep\n", "awake\n"]
    refused = await asyncio.to_thread(baton, "engine", "unload-lora", "a", *at)
    assert refused.returncode == 1
    assert refused.stderr.startswith("baton: no LoRA adapter 'a' is loaded")
    nameless = await asyncio.to_thread(baton, "engine", "sleep")
    assert nameless.returncode == 2
    assert "--server" in nameless.stderr
