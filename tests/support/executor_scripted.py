"""Executors over the scripted engine, and requests for them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from common.text.tokenizer import Tokenizer
from executor.config import EngineConfig, KvCacheConfig, ScriptedConfig, TransferConfig
from executor.engine.scripted_model import scripted_completion
from executor.executor import ExecutorRequest, GenerationExecutor, GenerationResult, ResultChunk
from executor.limits import ExecutorLimits
from executor.post.spec import TokenizerSpec
from protos.messages import DisaggRequestId, LedgerAudit, RequestType, SamplingParams
from protos.tokens import pack_token_ids

EMPTY_STATES = dict.fromkeys(("registered", "sent", "running", "streaming", "cancelling"), 0)
REFUSE, CRASH, EXIT, HANG = 31_001, 31_002, 31_003, 31_004


def config(*, lease_ms: int = 10_000, num_blocks: int = 1024, **script: Any) -> EngineConfig:
    return EngineConfig(
        engine="scripted",
        kv_cache=KvCacheConfig(num_blocks=num_blocks),
        transfer=TransferConfig(lease_ms=lease_ms),
        scripted=ScriptedConfig(
            refuse_token_id=REFUSE,
            crash_token_id=CRASH,
            exit_token_id=EXIT,
            hang_token_id=HANG,
            **script,
        ),
    )


def posted(engine: EngineConfig, num_workers: int) -> EngineConfig:
    """The same, its text made by postprocess workers."""
    executor = msgspec.structs.replace(engine.executor, postprocess_workers=num_workers)
    return msgspec.structs.replace(engine, executor=executor)


CONTRACT = config(step_ms=1.0, lease_ms=400, vocab_size=32_000, num_blocks=8192)
"""The engine of the contract suite."""


def expected(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What a request of the contract suite must stream."""
    return scripted_completion(pack_token_ids(prompt), 7, num_tokens, CONTRACT.scripted)


def request(
    external_id: str = "a",
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    deadline_s: float = 30.0,
    **more: Any,
) -> ExecutorRequest:
    return ExecutorRequest(
        external_id=external_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=7, **more),
        deadline_s=deadline_s,
    )


def context_request(external_id: str, prompt: tuple[int, ...], attempt: int = 1) -> ExecutorRequest:
    return ExecutorRequest(
        external_id=external_id,
        request_type=RequestType.CONTEXT_ONLY,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1, seed=7),
        deadline_s=30.0,
        disagg_request_id=DisaggRequestId(1, 2, attempt),
    )


def toy_spec(tokenizer: Any) -> TokenizerSpec | None:
    """A toy `tokenizer` is told to postprocess workers by its class's name."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return None
    kind = type(tokenizer)
    return TokenizerSpec(factory=f"{kind.__module__}:{kind.__qualname__}")


@contextlib.asynccontextmanager
async def running(
    engine: EngineConfig | None = None, *, tokenizer: Any = None, **limits: Any
) -> AsyncIterator[GenerationExecutor]:
    executor = await GenerationExecutor.create(
        engine or config(),
        name="test",
        tokenizer=tokenizer,
        limits=ExecutorLimits(**limits),
        tokenizer_spec=toy_spec(tokenizer),
    )
    try:
        yield executor
    finally:
        await executor.shutdown()


async def collect(result: GenerationResult) -> list[ResultChunk]:
    return [chunk async for chunk in result]


def tokens(chunks: list[ResultChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


async def audited(executor: GenerationExecutor) -> LedgerAudit:
    """The audit, with what must hold when no request is live."""
    audit = await executor.audit()
    assert audit.entries_by_state == EMPTY_STATES
    assert all(audit.counters[f"worker_entries_{state}"] == 0 for state in EMPTY_STATES)
    assert audit.blocks_by_owner["sequence"] == 0
    return audit


class CharTokenizer:
    """Every id is one character of its own, so text can be computed by hand."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(0x20000 + token_id) for token_id in token_ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def piece(self, token_id: int) -> str | None:
        return None
