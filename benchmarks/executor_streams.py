"""The executor's streams beside the bare loop's: paced, flat out, and beside idle ones."""

from __future__ import annotations

import asyncio
import functools

from benchmarks.executor_bare import BareLoop
from benchmarks.executor_load import (
    STEP_MS,
    Figures,
    Load,
    Meter,
    engine_config,
    executor_under_load,
)
from benchmarks.executor_plan import Plan

STREAMS = (1, 64, 1024)
NUM_ACTIVE = 64
NUM_IDLE = 1024


async def paced(plan: Plan, bare: BareLoop) -> dict[str, float]:
    """At a model's pace: latency and CPU."""
    metrics: dict[str, float] = {}
    config = engine_config(max(STREAMS), step_ms=STEP_MS)
    async with executor_under_load(config) as load:
        for num in STREAMS:
            ours, theirs = await plan.in_turn(
                functools.partial(load.window, num, plan.span),
                functools.partial(bare.window, num, STEP_MS, plan.span),
            )
            metrics |= {
                f"added_p50_us_{num}": ours.p50_us,
                f"bare_loop_p50_us_{num}": theirs.p50_us,
                f"added_p99_us_{num}": ours.p99_us,
                f"bare_loop_p99_us_{num}": theirs.p99_us,
                f"cpu_us_per_token_{num}": ours.cpu_us_per_token,
                f"bare_loop_cpu_us_per_token_{num}": theirs.cpu_us_per_token,
                f"cpu_ratio_to_bare_loop_{num}": ours.cpu_us_per_token / theirs.cpu_us_per_token,
                f"worker_cpu_us_per_token_{num}": ours.peer_us_per_token,
            }
    return metrics


async def flat_out(plan: Plan, bare: BareLoop) -> dict[str, float]:
    """With an engine that takes no time of its own but to make its tokens up."""
    metrics: dict[str, float] = {}
    async with executor_under_load(engine_config(max(STREAMS), step_ms=0)) as load:
        for num in STREAMS:
            ours, theirs = await plan.in_turn(
                functools.partial(load.window, num, plan.span),
                functools.partial(bare.window, num, 0, plan.span),
            )
            metrics[f"tokens_per_s_{num}"] = ours.tokens_per_s
            metrics[f"bare_loop_tokens_per_s_{num}"] = theirs.tokens_per_s
    return metrics


async def beside_idle_ones(plan: Plan) -> dict[str, float]:
    """Idle: submitted and read, but without a token, since the engine runs the others only."""
    async with executor_under_load(engine_config(NUM_ACTIVE, step_ms=STEP_MS)) as load:
        alone, beside = await plan.in_turn(
            functools.partial(load.window, NUM_ACTIVE, plan.span),
            functools.partial(_window_beside_idle, load, plan),
        )
    return {
        f"cpu_us_per_token_{NUM_ACTIVE}_no_idle": alone.cpu_us_per_token,
        f"cpu_us_per_token_{NUM_ACTIVE}_idle_{NUM_IDLE}": beside.cpu_us_per_token,
        f"cpu_ratio_idle_{NUM_IDLE}": beside.cpu_us_per_token / alone.cpu_us_per_token,
        f"added_p50_us_{NUM_ACTIVE}_no_idle": alone.p50_us,
        f"added_p50_us_{NUM_ACTIVE}_idle_{NUM_IDLE}": beside.p50_us,
    }


async def _window_beside_idle(load: Load, plan: Plan) -> Figures:
    meter, nothing = Meter(), Meter()
    async with load.streams(NUM_ACTIVE, meter):
        await asyncio.sleep(plan.span.warm_up_s)
        async with load.streams(NUM_IDLE, nothing):
            await asyncio.sleep(plan.span.warm_up_s)
            figures = await load.measure(meter, plan.span)
    assert nothing.num_tokens == 0, "the idle streams were not idle"
    return figures
