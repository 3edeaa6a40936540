"""context_only here, generation_only there, by hand: what fits and what is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from common.security import ClusterSecret
from context_server.service import ContextRole
from generation_server.service import GenerationRole
from protos import inference_pb2 as pb
from protos.codec import decode_params, encode_params, signed_params_to_proto
from protos.errors import BatonError
from protos.messages import ContextPhaseParams
from protos.status import error_from_rpc
from protos.tokens import pack_token_ids
from tests.support.serving_double import RunningServer, running_server, secret_of, wait_until

PROMPT = pack_token_ids(tuple(b"abcde"))


@contextlib.asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[tuple[RunningServer, RunningServer]]:
    async with (
        running_server(ContextRole, tmp_path) as context,
        running_server(GenerationRole, tmp_path) as generation,
    ):
        yield context, generation


def request(kind: pb.RequestType, **fields: Any) -> pb.GenerateRequest:
    fields = {"token_ids": PROMPT} | fields
    fields.setdefault("sampling", pb.SamplingParams(max_tokens=6))
    return pb.GenerateRequest(request_type=kind, **fields)


async def handed_over(context: RunningServer) -> pb.GenerateResponse:
    messages = await context.generate(request(pb.REQUEST_TYPE_CONTEXT_ONLY))
    return messages[-1]


async def test_two_legs_make_one_answer(tmp_path: Path) -> None:
    """Guards the hand-off's bookkeeping: first token once, one seed, each side's own usage."""
    async with pair(tmp_path) as (context, generation):
        (whole,) = [await generation.generate(request(pb.REQUEST_TYPE_CONTEXT_AND_GENERATION))]
        first = await handed_over(context)
        assert first.finish.reason == pb.FINISH_REASON_CONTEXT
        assert first.finish.usage.completion_tokens == 1
        assert not first.finish.HasField("generation_timing")
        params = decode_params(first.context_phase_params.payload)
        assert params.server_name == "context-t"
        assert params.model == "letters"
        assert params.first_text_length == 1
        assert params.seed == first.seed != 0
        rest = await generation.generate(
            request(
                pb.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=first.context_phase_params
            )
        )
        assert generation.executor.results[-1].request.sampling.seed == params.seed
        assert rest[-1].finish.HasField("context_timing")
        assert rest[-1].finish.usage.completion_tokens == 5
        for field in ("text", "token_index", "text_offset"):
            together = [getattr(message, field) for message in (first, *rest)]
            assert together == [getattr(message, field) for message in whole]
        assert context.executor.released == []  # the generation side pulls; nobody lets go
        assert b'baton_kv_transfer_bytes_total{role="generation"} 512.0' in (
            generation.process._metrics.render()
        )


async def test_minted_hand_off_ids_differ(tmp_path: Path) -> None:
    async with running_server(ContextRole, tmp_path) as context:
        ids = [
            str(
                decode_params(
                    (await handed_over(context)).context_phase_params.payload
                ).disagg_request_id
            )
            for _ in range(3)
        ]
    assert len(set(ids)) == 3


def change(name: str, value: object) -> Callable[[ContextPhaseParams], ContextPhaseParams]:
    def apply(params: ContextPhaseParams) -> ContextPhaseParams:
        if name.startswith("layout."):
            layout = msgspec.structs.replace(params.layout, **{name.partition(".")[2]: value})
            return msgspec.structs.replace(params, layout=layout)
        return msgspec.structs.replace(params, **{name: value})

    return apply


MISFITS = [
    ("layout.dtype", "bfloat16", "is bfloat16; it must be float32"),
    ("layout.num_layers", 3, "is 3; it must be 2"),
    ("layout.num_kv_heads", 2, "is 2; it must be 1"),
    ("layout.head_dim", 16, "is 16; it must be 8"),
    ("layout.tokens_per_block", 8, "is 8; it must be 4"),
    ("layout.tp_size", 2, "is 2; it must be 1"),
    ("layout.layout_version", 9, "is 9; it must be 1"),
    ("layout.model_fingerprint", "f2", "is f2; it must be f1"),
    ("model", "other", "is other; it must be letters"),
    ("transport", "ucx", "is ucx; it must be inproc"),
    ("rank_addresses", (), "is 0 addresses; it must be 1"),
    ("num_prompt_tokens", 4, "is 4; it must be 5"),
    ("prompt_digest", b"\x00" * 16, "must be .* the digest of the prompt"),
    ("first_token_ids", (300,), "is 300; it must be 0 to 255"),
]


@pytest.mark.parametrize(("name", "value", "story"), MISFITS, ids=[m[0] for m in MISFITS])
async def test_what_does_not_fit_is_refused_by_name(
    name: str, value: object, story: str, tmp_path: Path
) -> None:
    """Guards against KV of another model or prompt being used: each part is compared."""
    async with pair(tmp_path) as (context, generation):
        first = await handed_over(context)
        params = change(name, value)(decode_params(first.context_phase_params.payload))
        signed = secret_of(tmp_path).sign_params(encode_params(params))
        error = await refused(generation, signed_params_to_proto(signed))
        assert error.field.startswith(f"context_phase_params.{name}")
        assert error.limit
        assert re.search(story, error.message)
        assert not generation.executor.results


async def test_damaged_and_foreign_parameters_are_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as (context, generation):
        good = (await handed_over(context)).context_phase_params
        damaged = pb.SignedContextPhaseParams()
        damaged.CopyFrom(good)
        damaged.payload = good.payload[:-1] + bytes([good.payload[-1] ^ 1])
        error = await refused(generation, damaged)
        assert error.field == "context_phase_params.signature"
        other = ClusterSecret({good.key_id: b"another secret of 16 bytes"})
        error = await refused(generation, signed_params_to_proto(other.sign_params(good.payload)))
        assert error.field == "context_phase_params.signature"
        stranger = ClusterSecret({"k0": b"another secret of 16 bytes"})
        foreign = signed_params_to_proto(stranger.sign_params(good.payload))
        error = await refused(generation, foreign)
        assert (error.field, error.value) == ("context_phase_params.key_id", "k0")
        garbage = signed_params_to_proto(secret_of(tmp_path).sign_params(b"\xff\xff\xff"))
        error = await refused(generation, garbage)
        assert error.field == "context_phase_params"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": pack_token_ids(tuple(b"abcdf"))}, "context_phase_params.prompt_digest"),
        ({"text": "abcde", "token_ids": None}, "prompt"),
        ({"sampling": pb.SamplingParams(max_tokens=1)}, "sampling.max_tokens"),
        ({"sampling": pb.SamplingParams(max_tokens=6, seed=5)}, "sampling.seed"),
    ],
)
async def test_a_request_that_contradicts_its_hand_off(
    fields: dict[str, Any], field: str, tmp_path: Path
) -> None:
    async with pair(tmp_path) as (context, generation):
        good = (await handed_over(context)).context_phase_params
        assert (await refused(generation, good, **fields)).field == field


async def test_a_hand_off_that_reaches_nobody_is_let_go(tmp_path: Path) -> None:
    """Guards blocks pinned until the lease ends because the client left as prefill finished."""
    async with running_server(ContextRole, tmp_path) as context:
        context.executor.is_held = True
        call = context.inference.Generate(request(pb.REQUEST_TYPE_CONTEXT_ONLY))
        await wait_until(lambda: len(context.executor.results) == 1)
        result = context.executor.results[0]
        result.before_abort = lambda: context.executor.play(result)
        call.cancel()
        await wait_until(lambda: bool(context.executor.released), 2.0)
        assert context.executor.released == [result.request.disagg_request_id]


async def refused(
    server: RunningServer, params: pb.SignedContextPhaseParams, **fields: Any
) -> BatonError:
    message = request(pb.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=params, **fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.generate(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error_from_rpc(caught.value)
