"""Area `executor`: what the boundary between a server and its engine costs.

The scripted engine in a worker process of its own, reached through the real IPC
form; beside it, in turn and in the same run, a bare loop over the same bytes.
Figures are medians over rounds of windows (executor_load, executor_plan).
"""

from __future__ import annotations

import asyncio
import statistics
import time

import msgspec

from benchmarks import executor_streams, executor_switches
from benchmarks.executor_bare import BareLoop
from benchmarks.executor_load import STEP_MS, engine_config
from benchmarks.executor_plan import FULL, QUICK, Plan
from executor.engine.factory import create_engine
from executor.engine.seam import EngineRequest
from executor.executor import ExecutorRequest
from executor.ipc import KEY_BYTES, TO_WORKER, FrameSealer
from executor.messages import Submit
from executor.request import to_engine_request
from protos.messages import RequestType, SamplingParams
from protos.tokens import pack_token_ids

LONG_PROMPT_TOKENS = 32 * 1024
NUM_ACTIVE = 64


def run(is_quick: bool) -> dict[str, float]:
    plan = QUICK if is_quick else FULL
    metrics = asyncio.run(_streams(plan))
    engine_us = _engine_alone_us_per_token(plan)
    name = f"cpu_us_per_token_{NUM_ACTIVE}"
    metrics[f"engine_alone_{name}"] = engine_us
    metrics[f"worker_added_{name}"] = metrics[f"worker_{name}"] - engine_us
    return metrics | _long_request()


async def _streams(plan: Plan) -> dict[str, float]:
    bare = BareLoop(max(executor_streams.STREAMS))
    try:
        return {
            **await executor_streams.paced(plan, bare),
            **await executor_streams.flat_out(plan, bare),
            **await executor_streams.beside_idle_ones(plan),
            **await executor_switches.batched_wakes(plan),
            **await executor_switches.params_once(plan, bare),
            **await executor_switches.batched_sends(plan),
            **await executor_switches.text(plan),
        }
    finally:
        await bare.close()


def _engine_alone_us_per_token(plan: Plan) -> float:
    """The scripted engine's own CPU in a paced step, without a worker around it."""
    engine = create_engine(engine_config(NUM_ACTIVE, step_ms=STEP_MS), wake=lambda: None)
    for request_id in range(1, NUM_ACTIVE + 1):
        engine.submit(
            EngineRequest(
                request_id=request_id,
                request_type=RequestType.CONTEXT_AND_GENERATION,
                prompt_token_ids=pack_token_ids(range(1, 33)),
                sampling=SamplingParams(max_tokens=1 << 16, seed=7, ignore_eos=True),
                deadline_s=600.0,
            )
        )
    spans_s: list[float] = []
    give_up_s = time.monotonic() + plan.num_rounds * plan.span.half_s
    while time.monotonic() < give_up_s:
        start_s = time.thread_time()
        engine.step()
        spans_s.append(time.thread_time() - start_s)
    engine.close()
    return statistics.mean(spans_s) / NUM_ACTIVE * 1e6


def _long_request() -> dict[str, float]:
    """The frame of a long prompt, made by the proxy's own three calls; as JSON-like ints beside."""
    prompt = tuple(range(100_000, 100_000 + LONG_PROMPT_TOKENS))
    request = ExecutorRequest(
        external_id="a-long-one",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=512, seed=7),
        deadline_s=600.0,
    )
    start_s = time.thread_time()
    submit = Submit(to_engine_request(request, client_id=1), request.external_id)
    frame = FrameSealer(bytes(KEY_BYTES), TO_WORKER).seal(submit)
    took_s = time.thread_time() - start_s
    return {
        "request_bytes_32k_prompt": len(frame),
        "request_bytes_per_prompt_token_32k": len(frame) / LONG_PROMPT_TOKENS,
        "request_bytes_32k_prompt_as_msgpack_ints": len(msgspec.msgpack.encode(prompt)),
        "request_cpu_us_32k_prompt": took_s * 1e6,
    }
