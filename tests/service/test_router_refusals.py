"""What the router refuses, each by status, field, value and limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.security import create_secret
from protos import inference_pb2 as pb
from protos.errors import (
    BatonError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    ServerUnavailableError,
)
from tests.support.router_client import assert_at_rest, running_router, until
from tests.support.router_servers import LAYOUT, LIMITS, ScriptedServer, scripted_pair

SIGNED = pb.SignedContextPhaseParams(payload=b"x", key_id="k", signature=b"s")

# name, request fields, the error's class, its field, a part of its message
CASES: list[tuple[dict[str, Any], type[BatonError], str, str]] = [
    ({"token_ids": b""}, InvalidRequestError, "token_ids", "at least one token"),
    ({"token_ids": b"abc"}, InvalidRequestError, "token_ids", "multiple of 4"),
    ({"text": ""}, InvalidRequestError, "text", "at least one character"),
    ({"text": "hello"}, InvalidRequestError, "text", "send token_ids"),
    ({"stop": ["x"]}, InvalidRequestError, "sampling.stop", "no tokenizer"),
    ({"prompt": [1] * 401}, InvalidRequestError, "prompt", "at most 400"),
    ({"prompt": [1, 1000]}, InvalidRequestError, "token_ids[1]", "0 to 999"),
    ({"prompt": [-1]}, InvalidRequestError, "token_ids[0]", "0 to 999"),
    ({"stop_token_ids": [5000]}, InvalidRequestError, "sampling.stop_token_ids[0]", "5000"),
    ({"max_tokens": 0}, InvalidRequestError, "sampling.max_tokens", "at least 1"),
    ({"max_tokens": -3}, InvalidRequestError, "sampling.max_tokens", "-3"),
    ({"max_tokens": 498}, InvalidRequestError, "sampling.max_tokens", "at most 497"),
    ({"temperature": -0.1}, InvalidRequestError, "sampling.temperature", "-0.1"),
    ({"temperature": math.nan}, InvalidRequestError, "sampling.temperature", "nan"),
    ({"top_p": 0.0}, InvalidRequestError, "sampling.top_p", "over 0"),
    ({"top_p": 1.5}, InvalidRequestError, "sampling.top_p", "1.5"),
    ({"model": "other"}, ModelNotFoundError, "model", "'scripted'"),
    ({"external_id": "x" * 257}, InvalidRequestError, "external_id", "256"),
    ({"request_type": 9}, InvalidRequestError, "request_type", "9"),
    ({"request_type": 1}, InvalidRequestError, "request_type", "context_only"),
    ({"request_type": 2}, InvalidRequestError, "context_phase_params", "absent"),
    (
        {"request_type": 2, "context_phase_params": SIGNED},
        InvalidRequestError,
        "request_type",
        "generation_only",
    ),
    ({"context_phase_params": SIGNED}, InvalidRequestError, "context_phase_params", "given"),
    (
        {"disagg_request_id": pb.DisaggRequestId(router_epoch=1)},
        InvalidRequestError,
        "disagg_request_id",
        "the router mints it",
    ),
]


async def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    """Guards the whole matrix, with limits that differ between the roles: the tighter counts.
    No refused request may reach a server."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    tight = msgspec.structs.replace(LIMITS, max_prompt_tokens=400, max_total_tokens=500)
    context = ScriptedServer("context", secret)
    generation = ScriptedServer("generation", secret, limits=tight)
    await context.start()
    await generation.start()
    async with running_router(file, [context.address], [generation.address]) as client:
        for fields, kind, field, part in CASES:
            asked = dict(fields)
            prompt = asked.pop("prompt", (1, 2, 3))
            if "token_ids" in asked:  # as it is, instead of a packed prompt
                message = pb.GenerateRequest(token_ids=asked["token_ids"])
                with pytest.raises(Exception, match=part):
                    await client.inference.Generate(message).read()
                continue
            answer = await client.generate(prompt, **asked)
            error = answer.error
            assert type(error) is kind, f"{fields}: {error!r}"
            assert (error.field, part in error.message) == (field, True), f"{fields}: {error}"
        for prompt, max_tokens in (((1,) * 401, 2), ((1,) * 3, 498)):
            answer = await client.generate(prompt, max_tokens=max_tokens)
            assert answer.error is not None
            assert "on generation-0" in answer.error.message, "whose limit it is"
        no_prompt = client.inference.Generate(pb.GenerateRequest())
        with pytest.raises(Exception, match="one of text, chat and token_ids"):
            await no_prompt.read()
        assert context.seen.requests == generation.seen.requests == []
        await assert_at_rest(client, context, generation)
    await context.stop()
    await generation.stop()


async def test_an_external_id_is_unique_while_live(tmp_path: Path) -> None:
    """Guards against two streams under one id, of which Abort could end only one."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    async with (
        scripted_pair(secret) as (context, generation),
        running_router(file, [context.address], [generation.address]) as client,
    ):
        generation.script.hang_at = 1
        call = client.start(max_tokens=4, external_id="twin")
        await call.read()
        answer = await client.generate(max_tokens=4, external_id="twin")
        assert isinstance(answer.error, DuplicateRequestError)
        assert "'twin'" in answer.error.message
        call.cancel()
        await assert_at_rest(client, context, generation)


async def test_incompatible_servers_never_pair(tmp_path: Path) -> None:
    """Guards the hand-off: KV of another shape must be refused before traffic, by field."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16", tokens_per_block=32)
    context = ScriptedServer("context", secret)
    generation = ScriptedServer("generation", secret, layout=other)
    await context.start()
    await generation.start()
    async with running_router(
        file, [context.address], [generation.address], is_usable=False
    ) as client:
        servers = client.router.fleet.servers
        await until(lambda: all(server.is_up for server in servers), "both to be up")
        answer = await client.generate(max_tokens=2)
        assert isinstance(answer.error, ServerUnavailableError)
        assert "dtype 'float32' against 'bfloat16'" in answer.error.message
        assert "tokens_per_block 16 against 32" in answer.error.message
    await context.stop()
    await generation.stop()
