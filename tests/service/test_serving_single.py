"""Servers whose engine runs in their own process: the same service, and the same end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from context_server.service import ContextRole
from executor.config import EngineConfig, ExecutorConfig, ScriptedConfig
from generation_server.service import GenerationRole
from protos import inference_pb2 as pb
from protos.tokens import pack_token_ids
from serving.run import ServerProcess
from tests.support.serving_double import running_server

CRASH = 31_002
ENGINE_DIED = 70
"""The server's exit status."""
ALONE = EngineConfig(
    engine="scripted",
    scripted=ScriptedConfig(crash_token_id=CRASH),
    executor=ExecutorConfig(form="single"),
)
IN_A_WORLD = EngineConfig(engine="scripted")
PROMPT = tuple(range(100, 137))


def request(
    kind: pb.RequestType = pb.REQUEST_TYPE_CONTEXT_AND_GENERATION,
    prompt: tuple[int, ...] = PROMPT,
    **fields: Any,
) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=12, seed=5)
    return pb.GenerateRequest(
        token_ids=pack_token_ids(prompt), request_type=kind, sampling=sampling, **fields
    )


def tokens(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


async def test_a_hand_off_from_one_form_to_another(tmp_path: Path) -> None:
    """Guards: a form that shows outside: other tokens, another hand-off, another end."""
    async with (
        running_server(ContextRole, tmp_path, process_type=ServerProcess, engine=ALONE) as context,
        running_server(
            GenerationRole, tmp_path, process_type=ServerProcess, engine=IN_A_WORLD
        ) as generation,
    ):
        whole = tokens(await generation.generate(request()))
        assert tokens(await context.generate(request())) == whole
        first = await context.generate(request(pb.REQUEST_TYPE_CONTEXT_ONLY))
        params = first[-1].context_phase_params
        rest = await generation.generate(
            request(pb.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=params)
        )
        assert tokens(first) + tokens(rest) == whole


async def test_an_engine_that_dies_in_the_servers_process_ends_the_server(tmp_path: Path) -> None:
    """Told to whoever waits, with the cause; the process is still there to tell it."""
    async with running_server(
        ContextRole, tmp_path, process_type=ServerProcess, engine=ALONE
    ) as server:
        with pytest.raises(grpc.aio.AioRpcError, match="the engine crashes") as death:
            await server.generate(request(prompt=(1, CRASH)))
        assert death.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(server.task, 5) == ENGINE_DIED
