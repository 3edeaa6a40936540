"""Drives engines by hand: submit, step until done, collect what each request said."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from executor.config import EngineConfig, KvCacheConfig, SchedulerConfig, TransferConfig
from executor.engine.core import EngineCore
from executor.engine.seam import EngineFinish, EngineRequest
from executor.engine.torch_engine import create_torch_engine
from kv_transfer.inproc import InprocNetwork, InprocTransport
from protos.errors import ErrorData
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    RequestType,
    SamplingParams,
)
from protos.tokens import pack_token_ids

ENGINE_WAIT_S = 60.0


@dataclass
class Answer:
    """Everything one request said; `check` on each output is done while collecting."""

    token_ids: list[int] = field(default_factory=list)
    first_index: int | None = None
    finish: EngineFinish | None = None
    error: ErrorData | None = None

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None


class Driver:
    """One engine, its wake-up, and the answers so far."""

    def __init__(self, engine: EngineCore, woken: threading.Event) -> None:
        self.engine = engine
        self.woken = woken
        self.answers: dict[int, Answer] = {}
        self._ids = itertools.count(1)

    def submit(
        self,
        prompt: list[int],
        *,
        request_type: RequestType = RequestType.CONTEXT_AND_GENERATION,
        disagg_id: DisaggRequestId | None = None,
        params: ContextPhaseParams | None = None,
        deadline_s: float = 60.0,
        sampling: SamplingParams | None = None,
        max_tokens: int = 8,
    ) -> int:
        request_id = next(self._ids)
        self.engine.submit(
            EngineRequest(
                request_id=request_id,
                request_type=request_type,
                prompt_token_ids=pack_token_ids(prompt),
                sampling=sampling or SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
                deadline_s=deadline_s,
                disagg_request_id=params.disagg_request_id if params else disagg_id,
                context_phase_params=params,
            )
        )
        self.answers[request_id] = Answer()
        return request_id

    def step(self) -> None:
        for output in self.engine.step():
            answer = self.answers[output.request_id]
            assert not answer.is_over, "an output after the last one"
            if answer.first_index is None:
                answer.first_index = output.token_index
            assert output.token_index == answer.first_index + len(answer.token_ids)
            answer.token_ids.extend(output.token_ids)
            answer.finish, answer.error = output.finish, output.error
        self.engine.check()

    def step_or_wait(self) -> None:
        if self.engine.has_work():
            self.step()
        else:
            self.woken.wait(0.02)
            self.woken.clear()

    def run(self) -> None:
        """Until every request is over."""
        run_together([self])

    def answer(self, request_id: int) -> Answer:
        self.run()
        return self.answers[request_id]


def run_together(drivers: list[Driver]) -> None:
    until = time.monotonic() + ENGINE_WAIT_S
    while not all(a.is_over for driver in drivers for a in driver.answers.values()):
        assert time.monotonic() < until, "the engines did not finish"
        for driver in drivers:
            driver.step_or_wait()


def settle(drivers: list[Driver]) -> None:
    """Until no holder is left anywhere: leases and transfers have ended."""
    until = time.monotonic() + ENGINE_WAIT_S
    while any(driver.engine.audit().holders for driver in drivers):
        assert time.monotonic() < until, [d.engine.audit().holders for d in drivers]
        for driver in drivers:
            driver.step_or_wait()


def engine_config(
    model: Path,
    *,
    num_blocks: int = 64,
    tokens_per_block: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    lease_ms: int = 10_000,
    leased_share_max: float = 0.75,
    **scheduler: int,
) -> EngineConfig:
    assert dtype in ("float32", "bfloat16")
    return EngineConfig(
        model=str(model),
        dtype="float32" if dtype == "float32" else "bfloat16",
        device=device,
        num_threads=1,
        kv_cache=KvCacheConfig(
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            leased_share_max=leased_share_max,
        ),
        scheduler=SchedulerConfig(**scheduler),
        transfer=TransferConfig(transport="inproc", lease_ms=lease_ms),
    )


def make_driver(config: EngineConfig, network: InprocNetwork | None = None) -> Driver:
    woken = threading.Event()
    joined = network or InprocNetwork()
    engine = create_torch_engine(
        config, woken.set, make_transport=lambda _pool: InprocTransport(joined)
    )
    return Driver(engine, woken)
