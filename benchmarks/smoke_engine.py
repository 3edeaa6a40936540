"""Prefill and decode speed of the torch engine alone: no process, no queue, no wire."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

from baton.demo_model import demo_model_folder
from executor.config import EngineConfig, KvCacheConfig, SchedulerConfig, TransferConfig
from executor.engine.factory import create_engine
from executor.engine.seam import Engine, EngineRequest
from protos.messages import RequestType, SamplingParams
from protos.tokens import pack_token_ids

PROMPT_TOKENS = 512
DECODE_PROMPT_TOKENS = 64
BATCHES = (1, 8, 32)


def run(is_quick: bool) -> dict[str, float]:
    engine = create_engine(_config(demo_model_folder()), wake=lambda: None)
    bench = _EngineBench(engine)
    try:
        repetitions = 2 if is_quick else 5
        bench.prefill_tokens_per_s()  # warm-up
        metrics = {
            "prefill_tokens_per_s": statistics.median(
                bench.prefill_tokens_per_s() for _ in range(repetitions)
            )
        }
        steps = 16 if is_quick else 96
        for batch in BATCHES:
            metrics[f"decode_tokens_per_s_b{batch}"] = bench.decode_tokens_per_s(batch, steps)
        return metrics
    finally:
        engine.close()


def _config(model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        kv_cache=KvCacheConfig(num_blocks=1024),
        scheduler=SchedulerConfig(max_sequences=max(BATCHES), max_batch_tokens=2048),
        transfer=TransferConfig(transport="inproc"),
    )


class _EngineBench:
    """Random prompts from a fixed seed, never one twice: the prefix cache must not help."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = random.Random(7)
        self.next_request_id = 1

    def prefill_tokens_per_s(self) -> float:
        self._submit(PROMPT_TOKENS, max_tokens=1)
        start = time.perf_counter()
        self._drain()
        return PROMPT_TOKENS / (time.perf_counter() - start)

    def decode_tokens_per_s(self, batch: int, steps: int) -> float:
        """Only steps in which every sequence of the batch decodes are counted."""
        for _ in range(batch):
            self._submit(DECODE_PROMPT_TOKENS, max_tokens=steps + 8)
        num_tokens, elapsed_s = 0, 0.0
        while self.engine.has_work():
            start = time.perf_counter()
            outputs = self.engine.step()
            took_s = time.perf_counter() - start
            tokens = sum(len(output.token_ids) for output in outputs)
            if tokens == batch and not any(output.token_index == 0 for output in outputs):
                num_tokens += tokens
                elapsed_s += took_s
        return num_tokens / elapsed_s

    def _submit(self, num_tokens: int, max_tokens: int) -> None:
        vocabulary = self.engine.identity.model_info.limits.vocab_size
        prompt = [self.random.randrange(100, vocabulary) for _ in range(num_tokens)]
        self.engine.submit(
            EngineRequest(
                request_id=self.next_request_id,
                request_type=RequestType.CONTEXT_AND_GENERATION,
                prompt_token_ids=pack_token_ids(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
                deadline_s=600.0,
            )
        )
        self.next_request_id += 1

    def _drain(self) -> None:
        while self.engine.has_work():
            self.engine.step()
