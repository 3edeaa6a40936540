"""Both roles over the real executor: a worker process each, with the scripted engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from context_server.service import ContextRole
from executor.config import EngineConfig, KvCacheConfig, ScriptedConfig, TransferConfig
from generation_server.service import GenerationRole
from protos import control_pb2 as cpb
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from protos.codec import decode_params
from protos.control_codec import ledger_from_proto
from protos.errors import EngineDeadError, InvalidRequestError, OverloadedError, SlowConsumerError
from protos.status import error_from_rpc
from protos.tokens import pack_token_ids
from serving.role import Role
from serving.run import ServerProcess
from tests.support.serving_double import RunningServer, running_server, wait_until

ENGINE = EngineConfig(engine="scripted")
SLOW = EngineConfig(engine="scripted", scripted=ScriptedConfig(step_ms=20))
SHORT_LEASES = EngineConfig(
    engine="scripted",
    scripted=ScriptedConfig(step_ms=20),
    transfer=TransferConfig(lease_ms=500),
)
PROMPT = pack_token_ids(tuple(range(100, 137)))


def scripted(
    role: type[Role], folder: Path, engine: EngineConfig = ENGINE, **keys: Any
) -> AbstractAsyncContextManager[RunningServer]:
    return running_server(role, folder, process_type=ServerProcess, engine=engine, **keys)


def request(
    kind: pb.RequestType = pb.REQUEST_TYPE_CONTEXT_AND_GENERATION, **fields: Any
) -> pb.GenerateRequest:
    fields.setdefault("sampling", pb.SamplingParams(max_tokens=12, seed=5))
    return pb.GenerateRequest(token_ids=PROMPT, request_type=kind, **fields)


def tokens(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


async def blocks_live(server: RunningServer) -> int:
    answer = await server.control.GetLedger(cpb.GetLedgerRequest(), metadata=server.metadata)
    ledger = ledger_from_proto(answer)
    return sum(ledger.blocks_by_owner.values()) + len(ledger.holders)


async def nothing_is_held(server: RunningServer) -> None:
    async with asyncio.timeout(5):
        while await blocks_live(server):  # noqa: ASYNC110 - the ledger is asked by wire
            await asyncio.sleep(0.02)


async def test_two_legs_equal_one_server(tmp_path: Path) -> None:
    """Guards invariant 9 at the service: a hand-off by hand streams the same tokens."""
    async with (
        scripted(ContextRole, tmp_path) as context,
        scripted(GenerationRole, tmp_path) as generation,
    ):
        whole = await generation.generate(request())
        for server in (context, generation):  # both roles serve a whole request
            assert tokens(await server.generate(request())) == tokens(whole)
        first = await context.generate(request(pb.REQUEST_TYPE_CONTEXT_ONLY))
        signed = first[-1].context_phase_params
        rest = await generation.generate(
            request(pb.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=signed)
        )
        assert tokens(first) + tokens(rest) == tokens(whole)
        assert rest[0].token_index == 1
        params = decode_params(signed.payload)
        lease = cpb.LeaseRequest(pull_token=params.pull_token)
        lease.disagg_request_id.router_epoch = params.disagg_request_id.router_epoch
        lease.disagg_request_id.counter = params.disagg_request_id.counter
        assert (await context.control.Renew(lease, metadata=context.metadata)).found
        assert await blocks_live(context) > 0
        assert (await context.control.Release(lease, metadata=context.metadata)).found
        assert not (await context.control.Release(lease, metadata=context.metadata)).found
        for server in (context, generation):
            await nothing_is_held(server)


async def test_a_client_that_leaves_frees_everything(tmp_path: Path) -> None:
    """Guards a client that leaves while decoding or around its hand-off: all is freed without
    new traffic. A hand-off that was written before the client left waits for its lease."""
    async with scripted(ContextRole, tmp_path, SHORT_LEASES) as server:
        call = server.inference.Generate(request(sampling=pb.SamplingParams(max_tokens=500)))
        await call.read()
        assert await blocks_live(server) > 0
        call.cancel()
        await nothing_is_held(server)
        for delay_s in (0.0, 0.01, 0.02, 0.03):
            call = server.inference.Generate(request(pb.REQUEST_TYPE_CONTEXT_ONLY))
            await asyncio.sleep(delay_s)
            call.cancel()
        await wait_until(lambda: len(server.process._live) == 0)
        await nothing_is_held(server)


async def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    async with scripted(ContextRole, tmp_path) as server:
        for message, field in (
            (pb.GenerateRequest(text="hello"), "text"),
            (request(sampling=pb.SamplingParams(stop=["x"])), "sampling.stop"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.generate(message)
            error = error_from_rpc(caught.value)
            assert isinstance(error, InvalidRequestError)
            assert error.field == field


async def test_overload_is_refused_as_retryable(tmp_path: Path) -> None:
    async with scripted(ContextRole, tmp_path, SLOW, max_open_requests=2) as server:
        open_calls = [server.inference.Generate(request()) for _ in range(2)]
        for call in open_calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.generate(request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_from_rpc(caught.value)
        assert isinstance(error, OverloadedError)
        assert error.is_retryable
        for call in open_calls:
            call.cancel()


SMALL_BUFFERS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
"""Else gRPC took half a million messages on this host without making the server wait."""


async def read_all(call: Any) -> None:
    while await call.read():
        pass


async def test_a_client_that_does_not_read_is_ended_at_the_servers_limit(tmp_path: Path) -> None:
    """Guards `max_unread_tokens` of the file: without it the engine decodes to the end for a
    client that reads nothing."""
    endless = EngineConfig(
        engine="scripted",
        scripted=ScriptedConfig(max_total_tokens=1_000_000),
        kv_cache=KvCacheConfig(tokens_per_block=1024),
    )
    async with scripted(ContextRole, tmp_path, endless, max_unread_tokens=3000) as server:
        address = server.process.state.address
        async with grpc.aio.insecure_channel(address, options=SMALL_BUFFERS) as channel:
            stub: Any = pb_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(request(sampling=pb.SamplingParams(max_tokens=900_000)))
            await call.read()
            await nothing_is_held(server)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_from_rpc(caught.value)
        assert isinstance(error, SlowConsumerError)
        assert error.field == "max_unread_tokens"
        assert len(await server.generate(request()))


async def test_a_killed_worker_fails_every_stream_within_the_bound(tmp_path: Path) -> None:
    """Guards item 6: UNAVAILABLE for all within 2 s, then exit status 70."""
    async with scripted(GenerationRole, tmp_path, SLOW) as server:
        long = request(sampling=pb.SamplingParams(max_tokens=2000))
        streams = [asyncio.create_task(server.generate(long, timeout=60)) for _ in range(8)]
        await wait_until(lambda: len(server.process._live) == 8)
        (pid,) = server.process.state.serving().executor.worker_pids
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - killed_s < 2
        for outcome in outcomes:
            assert isinstance(outcome, grpc.aio.AioRpcError)
            assert outcome.code() is grpc.StatusCode.UNAVAILABLE
            assert isinstance(error_from_rpc(outcome), EngineDeadError)
        assert await asyncio.wait_for(server.task, 5) == 70
