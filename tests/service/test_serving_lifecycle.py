"""A server's life: ports, health, control, metrics, draining, the engine's death."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.process import ProcessOptions
from common.security import create_secret
from context_server.service import ContextRole
from generation_server.__main__ import main as generation_main
from generation_server.service import GenerationRole
from protos import control_pb2 as cpb
from protos import inference_pb2 as pb
from protos.errors import ConfigError, EngineDeadError, ServerUnavailableError
from protos.status import error_from_rpc
from serving.config import ServerConfig
from serving.run import ServerProcess
from serving.state import Serving
from tests.support.serving_double import RunningServer, running_server, wait_until

NAMES = ("", "liveness", "readiness", "baton.v1.Inference", "baton.v1.Control")
REQUEST = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=2))
SERVING = health_pb2.HealthCheckResponse.SERVING


async def is_good(server: RunningServer, name: str) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(server.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return bool(answer.status == SERVING)


async def test_health_and_state_follow_the_engine_both_ways(tmp_path: Path) -> None:
    """Guards invariant 12: a stalled engine is not ready, and a restart is not asked for yet."""

    async def info(server: RunningServer) -> Any:
        ask = cpb.GetServerInfoRequest()
        return await server.control.GetServerInfo(ask, metadata=server.metadata)

    async with running_server(ContextRole, tmp_path) as server:
        assert [await is_good(server, name) for name in NAMES] == [True] * 5
        for num_seconds in (3, 4):
            why = f"the worker has said nothing for {num_seconds} s"
            server.executor.trouble = ServerUnavailableError(why)
            await asyncio.sleep(0.7)
            told = await info(server)
            assert (told.state, told.detail) == ("stalled", why)
            assert [await is_good(server, name) for name in NAMES[:3]] == [False, True, False]
            with pytest.raises(grpc.aio.AioRpcError, match=f"is stalled: {why}") as refused:
                await server.generate(REQUEST)
            assert isinstance(error_from_rpc(refused.value), ServerUnavailableError)
        server.executor.trouble = None
        await asyncio.sleep(0.7)
        assert [await is_good(server, name) for name in NAMES] == [True] * 5
        assert (await info(server)).state == "ready"
        assert (await server.generate(REQUEST))[-1].HasField("finish")


@pytest.mark.parametrize("ends_by", ["a signal", "the death"])
async def test_a_stalled_server_still_ends(ends_by: str, tmp_path: Path) -> None:
    """Guards a state that cannot be left but by recovery."""
    async with running_server(ContextRole, tmp_path) as server:
        server.executor.trouble = ServerUnavailableError("said nothing")
        await wait_until(lambda: server.process.state.phase == "stalled")
        if ends_by == "a signal":
            assert await server.stop() == 0
        else:
            server.executor.die(EngineDeadError("given up"))
            assert await asyncio.wait_for(server.task, 5) == 70


async def test_reflection_lists_the_services(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path) as server:
        channel: Any = server.channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request_type: Any = reflection_pb2.ServerReflectionRequest
        ask = request_type(list_services="")
        call = stub.ServerReflectionInfo(iter([ask]))
        answers = [answer async for answer in call]
        names = [service.name for service in answers[0].list_services_response.service]
    assert {"baton.v1.Inference", "baton.v1.Control", "grpc.health.v1.Health"} <= set(names)


async def test_control_answers_those_who_hold_the_key(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path) as server:
        control, metadata = server.control, server.metadata
        lease = cpb.LeaseRequest(
            disagg_request_id=pb.DisaggRequestId(router_epoch=1, counter=2), pull_token=b"p"
        )
        calls = {
            "GetServerInfo": cpb.GetServerInfoRequest(),
            "GetModelInfo": cpb.GetModelInfoRequest(),
            "GetLoad": cpb.GetLoadRequest(),
            "GetLedger": cpb.GetLedgerRequest(),
            "Release": lease,
            "Renew": lease,
        }
        answers = {}
        for name, message in calls.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(control, name)(message)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, name
            answers[name] = await getattr(control, name)(message, metadata=metadata)
        info = answers["GetServerInfo"]
        assert (info.name, info.role, info.state) == ("context-t", "context", "ready")
        assert info.layout.tokens_per_block == 4
        assert info.address == server.process.state.address
        assert answers["GetModelInfo"].max_prompt_tokens == 32
        assert answers["GetLoad"].num_queued == 3
        assert answers["GetLedger"].holders[0].block == 5
        assert answers["Release"].found
        assert answers["Renew"].found
        with pytest.raises(grpc.aio.AioRpcError, match="disagg_request_id is absent"):
            await control.Release(cpb.LeaseRequest(), metadata=metadata)


async def test_metrics_tell_counts_and_gauges_and_leave_no_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    async with running_server(ContextRole, tmp_path, metrics_listen="127.0.0.1:0") as server:
        await server.generate(REQUEST)
        with pytest.raises(grpc.aio.AioRpcError):
            await server.generate(pb.GenerateRequest())
        assert server.process._metrics_server is not None
        url = f"http://{server.process._metrics_server.address}/metrics"
        body = (await asyncio.to_thread(_fetch, url)).decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(_fetch, url + "x")
    lines = body.splitlines()
    for line in (
        'baton_requests_total{outcome="ok",role="context"} 1.0',
        'baton_requests_total{outcome="invalid_argument",role="context"} 1.0',
        'baton_requests_open{role="context"} 0.0',
        'baton_ttft_seconds_count{role="context"} 1.0',
        'baton_itl_seconds_count{role="context"} 1.0',
        'baton_queue_requests{role="context"} 3.0',
        'baton_blocks{kind="state",name="free",role="context"} 60.0',
        'baton_blocks{kind="owner",name="sequence",role="context"} 4.0',
        'baton_ledger_entries{role="context",state="running"} 2.0',
    ):
        assert line in lines
    names = [thread.name for thread in threading.enumerate()]
    assert "metrics" not in names, (threads, names)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


async def test_stopping_ends_open_streams_after_the_grace(tmp_path: Path) -> None:
    """Guards a stop that hangs on a stream, and one that cuts without a word."""
    async with running_server(ContextRole, tmp_path, shutdown_grace_s=0.3) as server:
        server.executor.is_held = True
        stream = asyncio.create_task(server.generate(REQUEST))
        await wait_until(lambda: len(server.executor.results) == 1)
        server.stopping.set()
        await wait_until(lambda: server.process.state.phase == "draining")
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await server.generate(REQUEST)
        assert not await is_good(server, "readiness")
        assert await is_good(server, "liveness")
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await stream
        assert isinstance(error_from_rpc(caught.value), ServerUnavailableError)
        assert await server.stop() == 0
        assert server.executor.is_shut_down


async def test_stopping_lets_a_short_stream_finish(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path, shutdown_grace_s=5) as server:
        server.executor.is_held = True
        stream = asyncio.create_task(server.generate(REQUEST))
        await wait_until(lambda: len(server.executor.results) == 1)
        server.stopping.set()
        await wait_until(lambda: server.process.state.phase == "draining")
        server.executor.play(server.executor.results[0])
        assert (await stream)[-1].HasField("finish")
        assert await server.stop() == 0


async def test_engine_death_reaches_every_stream_and_ends_the_server(tmp_path: Path) -> None:
    """Guards invariant 6 at the service: all open requests fail at once, exit status 70."""
    async with running_server(GenerationRole, tmp_path) as server:
        server.executor.is_held = True
        streams = [asyncio.create_task(server.generate(REQUEST)) for _ in range(5)]
        await wait_until(lambda: len(server.executor.results) == 5)
        server.executor.die(EngineDeadError("the worker was killed by signal 9"))
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError, match="signal 9") as caught:
                await asyncio.wait_for(stream, 2)
            assert isinstance(error_from_rpc(caught.value), EngineDeadError)
        assert await asyncio.wait_for(server.task, 5) == 70


async def test_two_servers_never_share_a_port(tmp_path: Path) -> None:
    """Guards against SO_REUSEPORT, by which a second server would steal half the calls."""
    async with running_server(ContextRole, tmp_path) as server:
        with pytest.raises(
            ConfigError, match=r"cannot listen on .*address already in use"
        ) as caught:
            async with running_server(ContextRole, tmp_path, listen=server.process.state.address):
                pass
        assert caught.value.field == "listen"


async def test_a_metrics_port_in_use_is_told_before_the_model_loads(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match="metrics") as caught:
            async with running_server(
                ContextRole, tmp_path, process_type=NeverLoads, metrics_listen=taken
            ):
                pass
    assert caught.value.field == "metrics_listen"


class NeverLoads(ServerProcess):
    """Its engine takes for ever."""

    async def start_serving(self) -> Serving:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_loading_server_says_so_and_stops_when_told(tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    config = ServerConfig(name="c", listen="127.0.0.1:0", secret_file=str(tmp_path / "secret"))
    options = ProcessOptions(config=tmp_path, log_level="error")
    process, stop = NeverLoads(config, ContextRole, options), asyncio.Event()
    task = asyncio.create_task(process.serve(stop))
    await wait_until(lambda: bool(process.state.address))
    server = RunningServer(process, task, stop)
    with pytest.raises(grpc.aio.AioRpcError, match="starting: the engine is starting"):
        await server.generate(REQUEST, wait_for_ready=True)
    info = await server.control.GetServerInfo(cpb.GetServerInfoRequest(), metadata=server.metadata)
    assert info.state == "starting"
    assert [await is_good(server, name) for name in NAMES[:3]] == [False, True, False]
    assert await server.stop() == 0
    await server.channel.close()


@pytest.mark.parametrize(
    ("text", "story"),
    [
        ("secret_file: SECRET\nnmae: x", "unknown key 'nmae'; did you mean 'name'"),
        ("secret_file: /nowhere/secret", "cannot read the cluster secret /nowhere/secret"),
        ("secret_file: SECRET\nlisten: '8101'", "listen is '8101'; it must be HOST:PORT"),
        ("secret_file: SECRET\nlisten: 127.0.0.1:0", "engine.model is empty"),
        (
            "secret_file: SECRET\nlisten: 127.0.0.1:0\nengine: {model: /nowhere/model}",
            "model .*/nowhere/model. is neither a folder with a config.json nor a .gguf file",
        ),
        ("secret_file: SECRET\nshutdown_grace_s: -1", "shutdown_grace_s"),
    ],
)
def test_what_cannot_start_is_one_line_and_status_2(
    text: str, story: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_secret(tmp_path / "secret")
    file = tmp_path / "server.yaml"
    file.write_text(text.replace("SECRET", str(tmp_path / "secret")))
    assert generation_main(["--config", str(file), "--log-level", "error"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(story, captured.err)
