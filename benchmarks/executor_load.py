"""Load on a real executor: open streams, real consumers, one window of measuring.

The scripted engine's tokens are stamps of the monotonic clock, which all
processes of a host share, taken as its step returns them; so a token itself
tells how long it took to its consumer. A window has two halves: in the first
the consumers only count, and CPU is taken; in the second they read the stamps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

from common.text.tokenizer import Tokenizer
from executor.config import (
    EngineConfig,
    ExecutorConfig,
    KvCacheConfig,
    SchedulerConfig,
    ScriptedConfig,
)
from executor.executor import ExecutorRequest, GenerationExecutor, GenerationResult
from executor.limits import ExecutorLimits
from protos.errors import OverloadedError, RequestCancelledError
from protos.messages import SamplingParams

STAMP_US_MAX = (1 << 31) - 1
"""Stamps are microseconds modulo this: they repeat after 36 minutes."""
MAX_TOKENS = 1 << 20
"""More than any window streams."""
QUEUE_MESSAGES_MAX = 64
"""Less than by default: what is under way when a flat-out window ends has to be read."""
RETRY_S = 0.001
STEP_MS = 10.0
"""The pace of paced windows: a decode step of a model of some size."""


@dataclasses.dataclass(frozen=True)
class Span:
    """How long a window's halves are, and how long the streams run before it."""

    warm_up_s: float
    half_s: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """One window's. `peer_us_per_token`: CPU of the process that makes the tokens."""

    tokens_per_s: float
    cpu_us_per_token: float
    peer_us_per_token: float
    p50_us: float
    p99_us: float


def engine_config(
    max_sequences: int,
    *,
    step_ms: float,
    vocab_size: int = 0,
    model: str = "",
    executor: ExecutorConfig | None = None,
) -> EngineConfig:
    """`vocab_size` 0: stamps; else the scripted tokens, which a tokenizer can decode.

    `model` is where postprocess workers find that tokenizer.
    """
    return EngineConfig(
        engine="scripted",
        model=model,
        executor=executor or ExecutorConfig(),
        kv_cache=KvCacheConfig(num_blocks=1 << 16, tokens_per_block=1 << 16),
        scheduler=SchedulerConfig(
            max_sequences=max_sequences,
            max_batch_tokens=max(max_sequences, 512),
            max_queued=4096,
        ),
        scripted=ScriptedConfig(
            step_ms=step_ms,
            stamps_tokens=vocab_size == 0,
            vocab_size=vocab_size or STAMP_US_MAX,
            max_total_tokens=2 * MAX_TOKENS,
        ),
    )


def process_cpu_s(pid: int) -> float:
    """CPU time of any process, in nanoseconds' resolution: Linux's clock for that pid."""
    return time.clock_gettime((~pid << 3) | 2)


class Meter:
    """Counts tokens, or keeps when they came, for all the consumers of a window."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._is_timing = False
        self._arrivals: list[tuple[float, Sequence[int]]] = []

    def add(self, token_ids: Sequence[int]) -> None:
        if self._is_timing:
            self._arrivals.append((time.monotonic(), token_ids))
        else:
            self.num_tokens += len(token_ids)

    async def measure(self, half_s: float, peer_pid: int) -> Figures:
        self.num_tokens = 0
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        start_peer_s = process_cpu_s(peer_pid)
        await asyncio.sleep(half_s)
        cpu_s, peer_s = time.process_time() - start_cpu_s, process_cpu_s(peer_pid) - start_peer_s
        num_tokens, elapsed_s = max(self.num_tokens, 1), time.monotonic() - start_s
        self._arrivals = []
        self._is_timing = True
        await asyncio.sleep(half_s)
        self._is_timing = False
        delays_us = self._delays_us()
        return Figures(
            tokens_per_s=num_tokens / elapsed_s,
            cpu_us_per_token=cpu_s / num_tokens * 1e6,
            peer_us_per_token=peer_s / num_tokens * 1e6,
            p50_us=delays_us[len(delays_us) // 2],
            p99_us=delays_us[len(delays_us) * 99 // 100],
        )

    def _delays_us(self) -> list[int]:
        """Sorted, and not empty."""
        delays_us = [
            (int(now_s * 1e6) - stamp_us) % STAMP_US_MAX
            for now_s, token_ids in self._arrivals
            for stamp_us in token_ids
        ]
        return sorted(delays_us) or [0]


class Load:
    """Streams on one executor; none is open between windows."""

    def __init__(self, executor: GenerationExecutor) -> None:
        self.executor = executor
        self._num_opened = 0

    async def window(self, num_streams: int, span: Span) -> Figures:
        meter = Meter()
        async with self.streams(num_streams, meter):
            await asyncio.sleep(span.warm_up_s)
            return await self.measure(meter, span)

    async def measure(self, meter: Meter, span: Span) -> Figures:
        return await meter.measure(span.half_s, self.executor.worker_pids[0])

    @contextlib.asynccontextmanager
    async def streams(self, num_streams: int, meter: Meter) -> AsyncIterator[None]:
        """Each with a task of its own that reads it, as a server's handler would."""
        results = [await self._open() for _ in range(num_streams)]
        tasks = [asyncio.create_task(_read(result, meter)) for result in results]
        try:
            yield
        finally:
            for result in results:
                result.abort()
            await asyncio.gather(*tasks)

    async def answer(self, num_requests: int) -> None:
        """As many requests of one token each, all at once."""
        meter = Meter()
        results = [await self._open(max_tokens=1) for _ in range(num_requests)]
        await asyncio.gather(*[_read(result, meter) for result in results])
        assert meter.num_tokens == num_requests

    async def _open(self, max_tokens: int = MAX_TOKENS) -> GenerationResult:
        self._num_opened += 1
        request = ExecutorRequest(
            external_id=f"stream-{self._num_opened}",
            prompt_token_ids=tuple(range(1, 33)),
            sampling=SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True),
            deadline_s=600.0,
        )
        while True:
            try:
                return self.executor.submit(request)
            except OverloadedError:  # the queue to the worker is short here
                await asyncio.sleep(RETRY_S)


async def _read(result: GenerationResult, meter: Meter) -> None:
    with contextlib.suppress(RequestCancelledError):
        async for chunk in result:
            meter.add(chunk.token_ids)


@contextlib.asynccontextmanager
async def executor_under_load(
    config: EngineConfig, tokenizer: Tokenizer | None = None
) -> AsyncIterator[Load]:
    limits = dataclasses.replace(ExecutorLimits.of(config), queue_messages_max=QUEUE_MESSAGES_MAX)
    executor = await GenerationExecutor.create(
        config, name="benchmark", tokenizer=tokenizer, limits=limits
    )
    try:
        yield Load(executor)
    finally:
        await executor.shutdown()
