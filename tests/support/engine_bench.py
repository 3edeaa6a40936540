"""One engine of either kind behind the seam, driven as the executor's worker does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from executor.config import EngineConfig, KvCacheConfig, ScriptedConfig
from executor.engine.factory import create_engine
from executor.engine.local import LocalExtras
from executor.engine.seam import Engine, EngineOutput, EngineRequest
from protos.messages import DisaggRequestId, RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.engine_drive import engine_config
from tests.support.engine_models import VOCAB_SIZE

WAIT_S = 60.0
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


class Bench:
    """One engine, driven as the executor's worker does."""

    def __init__(self, config: EngineConfig) -> None:
        self.woken = threading.Event()
        self.engine: Engine = create_engine(config, self.woken.set)
        self.outputs: dict[int, list[EngineOutput]] = {}

    def submit(
        self,
        request_id: int,
        *,
        prompt: tuple[int, ...] = PROMPT,
        max_tokens: int = 4,
        request_type: RequestType = RequestType.CONTEXT_AND_GENERATION,
        disagg_id: DisaggRequestId | None = None,
        deadline_s: float = 30.0,
        prefix: tuple[int, ...] = (),
        temperature: float = 0.0,
        context_logits: bool = False,
        generation_logits: bool = False,
        local: LocalExtras | None = None,
    ) -> None:
        self.engine.submit(
            EngineRequest(
                request_id=request_id,
                request_type=request_type,
                prompt_token_ids=pack_token_ids(prompt),
                sampling=SamplingParams(
                    max_tokens=max_tokens, seed=3, temperature=temperature, ignore_eos=True
                ),
                deadline_s=deadline_s,
                disagg_request_id=disagg_id,
                output_prefix_token_ids=pack_token_ids(prefix),
                return_context_logits=context_logits,
                return_generation_logits=generation_logits,
                local=local,
            )
        )
        self.outputs[request_id] = []

    def step(self) -> None:
        for output in self.engine.step():
            assert not self.is_over(output.request_id), "an output after the last one"
            self.outputs[output.request_id].append(output)

    def is_over(self, request_id: int) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and (outputs[-1].finish is not None or outputs[-1].error is not None)

    def until(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < end_s, "the engine came to no end"
            if self.engine.has_work():
                self.step()
                continue
            due_s = self.engine.next_deadline_s()
            self.woken.wait(0.02 if due_s is None else min(due_s, 0.02))
            self.woken.clear()

    def run(self) -> None:
        self.until(lambda: all(self.is_over(request_id) for request_id in self.outputs))

    def rest(self) -> None:
        """Until no holder is left."""
        self.until(lambda: not self.engine.audit().holders)

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]


@contextmanager
def open_bench(kind: str, checkpoint: Path) -> Iterator[Bench]:
    """`kind`: torch or scripted. Closed twice at the end, which must be harmless."""
    threads = torch.get_num_threads()
    config = engine_config(checkpoint, lease_ms=60, max_queued=3)
    if kind == "scripted":
        config = EngineConfig(
            engine="scripted",
            kv_cache=KvCacheConfig(num_blocks=64, tokens_per_block=8),
            scripted=ScriptedConfig(vocab_size=VOCAB_SIZE, step_ms=0.5),
            scheduler=config.scheduler,
            transfer=config.transfer,
        )
    made = Bench(config)
    yield made
    made.engine.close()
    made.engine.close()
    torch.set_num_threads(threads)
