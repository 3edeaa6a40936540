"""The Inference service by wire: a real gRPC server and client over an executor double."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from context_server.service import ContextRole
from generation_server.service import GenerationRole
from protos import inference_pb2 as pb
from protos.errors import BatonError
from protos.status import error_from_rpc
from protos.tokens import pack_token_ids
from serving.role import Role
from tests.support.serving_double import EOS, RunningServer, running_server, wait_until


def sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"max_tokens": 4} | fields)


def text_request(text: str = "abc", **fields: Any) -> pb.GenerateRequest:
    fields.setdefault("sampling", sampling())
    return pb.GenerateRequest(text=text, **fields)


async def refused(
    server: RunningServer, request: pb.GenerateRequest, **call: Any
) -> tuple[grpc.StatusCode, BatonError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.generate(request, **call)
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code, error_from_rpc(caught.value)


async def test_a_stream_tells_seed_first_and_finish_last_once(tmp_path: Path) -> None:
    """Guards the protocol's shape: every chunk indexed, one terminal message."""
    async with running_server(ContextRole, tmp_path) as server:
        messages = await server.generate(text_request())
    assert "".join(message.text for message in messages) == "cbac"
    assert [message.token_index for message in messages] == [0, 1, 2, 3]
    assert [message.HasField("finish") for message in messages] == [False] * 3 + [True]
    assert messages[0].seed != 0
    assert len({message.external_id for message in messages}) == 1
    assert messages[-1].finish.reason == pb.FINISH_REASON_LENGTH
    assert messages[-1].finish.usage.completion_tokens == 4
    assert messages[-1].finish.HasField("context_timing")
    assert messages[-1].finish.HasField("generation_timing")


async def test_chat_and_token_ids_are_prompts_too(tmp_path: Path) -> None:
    async with running_server(GenerationRole, tmp_path) as server:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        await server.generate(pb.GenerateRequest(chat=chat, sampling=sampling(seed=9)))
        packed = pack_token_ids((65, 66))
        await server.generate(pb.GenerateRequest(token_ids=packed, external_id="mine"))
        first, second = (result.request for result in server.executor.results)
    assert bytes(first.prompt_token_ids) == b"user:hi;"
    assert first.sampling.seed == 9
    assert first.deadline_s == pytest.approx(10, abs=1)
    assert second.external_id == "mine"
    assert second.sampling.max_tokens == 38  # what 40 tokens leave room for


BAD = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt", "absent"),
    (text_request(""), "INVALID_ARGUMENT", "text", "at least one character"),
    (text_request("x" * 33), "INVALID_ARGUMENT", "prompt", "33 tokens; .*at most 32 tokens"),
    (text_request("x" * 9000), "INVALID_ARGUMENT", "text", "9000 characters; .*at most 32 tokens"),
    (
        pb.GenerateRequest(token_ids=pack_token_ids((1, 256))),
        "INVALID_ARGUMENT",
        "token_ids[1]",
        "256; .*0 to 255",
    ),
    (
        pb.GenerateRequest(token_ids=pack_token_ids((-1,))),
        "INVALID_ARGUMENT",
        "token_ids[0]",
        "-1; .*0 to 255",
    ),
    (pb.GenerateRequest(token_ids=b"123"), "INVALID_ARGUMENT", "token_ids", "3 bytes"),
    (
        text_request(sampling=sampling(stop_token_ids=[999])),
        "INVALID_ARGUMENT",
        "sampling.stop_token_ids[0]",
        "999; .*0 to 255",
    ),
    (
        text_request(sampling=sampling(max_tokens=0)),
        "INVALID_ARGUMENT",
        "sampling.max_tokens",
        "is 0; it must be at least 1",
    ),
    (
        text_request(sampling=sampling(max_tokens=-3)),
        "INVALID_ARGUMENT",
        "sampling.max_tokens",
        "is -3; it must be at least 1",
    ),
    (
        text_request(sampling=sampling(max_tokens=38)),
        "INVALID_ARGUMENT",
        "sampling.max_tokens",
        "is 38; it must be at most 37 after a prompt of 3 tokens .*40",
    ),
    (
        text_request(sampling=sampling(temperature=-0.5)),
        "INVALID_ARGUMENT",
        "sampling.temperature",
        "-0.5; .*at least 0",
    ),
    (
        text_request(sampling=sampling(temperature=math.nan)),
        "INVALID_ARGUMENT",
        "sampling.temperature",
        "nan; .*finite",
    ),
    (
        text_request(sampling=sampling(top_p=0.0)),
        "INVALID_ARGUMENT",
        "sampling.top_p",
        "0.0; .*over 0, at most 1",
    ),
    (
        text_request(sampling=sampling(top_p=1.5)),
        "INVALID_ARGUMENT",
        "sampling.top_p",
        "1.5; .*over 0, at most 1",
    ),
    (text_request(model="gpt"), "NOT_FOUND", "model", "'gpt' is not served here.*'letters'"),
    (
        text_request(request_type=pb.REQUEST_TYPE_GENERATION_ONLY),
        "INVALID_ARGUMENT",
        "context_phase_params",
        "absent; .*given in a generation_only",
    ),
    (text_request(request_type=9), "INVALID_ARGUMENT", "request_type", "9"),
]


@pytest.mark.parametrize("bad", BAD, ids=[f"{field}-{story}" for _, _, field, story in BAD])
async def test_bad_input_names_field_value_and_limit(
    bad: tuple[pb.GenerateRequest, str, str, str], tmp_path: Path
) -> None:
    """Guards item 5 of the first release: a refusal a caller can act on, and nothing left open."""
    request, status, field, story = bad
    async with running_server(GenerationRole, tmp_path) as server:
        code, error = await refused(server, request)
        assert code.name == status
        assert error.field == field
        assert error.limit or field == "prompt"
        assert re.search(story, error.message)
        assert not server.executor.results
        assert len(server.process._live) == 0


@pytest.mark.parametrize(
    ("role", "request_type", "name"),
    [
        (ContextRole, pb.REQUEST_TYPE_GENERATION_ONLY, "generation_only"),
        (GenerationRole, pb.REQUEST_TYPE_CONTEXT_ONLY, "context_only"),
    ],
)
async def test_a_role_refuses_the_other_half_by_name(
    role: type[Role], request_type: pb.RequestType, name: str, tmp_path: Path
) -> None:
    signed = pb.SignedContextPhaseParams(payload=b"x", key_id="k", signature=b"s")
    request = text_request(request_type=request_type)
    if name == "generation_only":
        request.context_phase_params.CopyFrom(signed)
    async with running_server(role, tmp_path) as server:
        code, error = await refused(server, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == "request_type"
    assert error.value == name
    assert f"on a {role.name} server" in error.message


async def test_a_live_external_id_is_refused_and_free_afterwards(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path) as server:
        server.executor.is_held = True
        first = asyncio.create_task(server.generate(text_request(external_id="one")))
        await wait_until(lambda: len(server.executor.results) == 1)
        code, error = await refused(server, text_request(external_id="one"))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert (error.field, error.value) == ("external_id", "one")
        server.executor.play(server.executor.results[0])
        await first
        server.executor.is_held = False
        assert await server.generate(text_request(external_id="one"))


async def test_a_client_that_leaves_stops_its_request_at_once(tmp_path: Path) -> None:
    """Guards against work for nobody: an abort within moments, not at the next token."""
    async with running_server(ContextRole, tmp_path) as server:
        server.executor.is_held = True
        call = server.inference.Generate(text_request())
        await wait_until(lambda: len(server.executor.results) == 1)
        call.cancel()
        await wait_until(lambda: server.executor.results[0].is_aborted, 1.0)
        await wait_until(lambda: len(server.process._live) == 0, 1.0)
        assert b'outcome="cancelled",role="context"} 1.0' in server.process._metrics.render()


async def test_abort_ends_the_stream_with_the_reason(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path) as server:
        server.executor.is_held = True
        stream = asyncio.create_task(refused(server, text_request(external_id="one")))
        await wait_until(lambda: len(server.executor.results) == 1)
        answer = await server.inference.Abort(
            pb.AbortRequest(external_ids=["one", "two"], reason="no longer needed")
        )
        assert (list(answer.aborted), list(answer.unknown)) == (["one"], ["two"])
        code, error = await stream
        assert code is grpc.StatusCode.CANCELLED
        assert "no longer needed" in error.message


async def test_the_nearest_deadline_counts(tmp_path: Path) -> None:
    """Guards against a request that outlives its caller: both deadlines reach the engine."""
    async with running_server(ContextRole, tmp_path) as server:
        await server.generate(text_request(deadline_ms=2000), timeout=5)
        await server.generate(text_request(deadline_ms=9000), timeout=3)
        await server.generate(text_request(), timeout=None)
        near, far, default = (result.request.deadline_s for result in server.executor.results)
        assert 1.5 < near <= 2
        assert 2.5 < far <= 3.1  # gRPC rounds its timeouts
        assert 590 < default <= 600
        server.executor.is_held = True
        code, _ = await refused(server, text_request(), timeout=0.2)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until(lambda: server.executor.results[-1].is_aborted, 1.0)


async def test_internal_fields_need_the_control_token(tmp_path: Path) -> None:
    """Guards against a client that names another's hand-off."""
    request = text_request(
        disagg_request_id=pb.DisaggRequestId(router_epoch=1, counter=2, attempt=0),
        request_type=pb.REQUEST_TYPE_CONTEXT_ONLY,
    )
    async with running_server(ContextRole, tmp_path) as server:
        code, error = await refused(server, request)
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert error.value == "absent"
        code, error = await refused(server, request, metadata=(("x-baton-control", "k:00"),))
        assert error.value == "wrong"
        await server.generate(request, metadata=server.metadata)
        assert str(server.executor.results[0].request.disagg_request_id).endswith("-00000002-0")


async def test_an_unexpected_failure_is_internal_and_ends_one_request(tmp_path: Path) -> None:
    """Guards against a defect's text reaching clients, and against a stream left open."""
    async with running_server(ContextRole, tmp_path) as server:
        server.executor.breaks_on_submit = True
        code, error = await refused(server, text_request())
        assert code is grpc.StatusCode.INTERNAL
        assert "inner secret" not in error.message
        server.executor.breaks_on_submit = False
        assert await server.generate(text_request())


async def test_stop_by_the_first_token_is_a_whole_answer(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path) as server:
        request = text_request("ab" + chr(EOS), request_type=pb.REQUEST_TYPE_CONTEXT_ONLY)
        (message,) = await server.generate(request)
    assert message.finish.reason == pb.FINISH_REASON_STOP
    assert message.finish.stop_token_id == EOS
    assert not message.HasField("context_phase_params")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x1a\x04\xff\xfe\xfd\xfc",  # `text` that is not UTF-8
        b"\x32\x7f",  # `sampling` cut short
    ],
)
@pytest.mark.parametrize(
    "method", ["Inference/Generate", "Inference/Abort", "Control/GetServerInfo"]
)
async def test_what_is_no_protobuf_is_refused_by_name(
    tmp_path: Path, garbage: bytes, method: str
) -> None:
    """gRPC answered an undecodable message with UNKNOWN and a Python exception's text."""
    if method != "Inference/Generate" and garbage.startswith((b"\x1a", b"\x32")):
        garbage = b"\x0a"  # those fields mean nothing to the other methods
    async with running_server(ContextRole, tmp_path) as server:
        channel = grpc.aio.insecure_channel(server.process.state.address)
        raw_call: Any = channel.unary_stream(f"/baton.v1.{method}")
        call = raw_call(garbage, timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        await channel.close()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_from_rpc(caught.value).field == "request"
        assert len(await server.generate(text_request())) == 4
