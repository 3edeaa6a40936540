"""What single choices of the executor pay: each measured beside itself switched off.

Only batched sends are a setting. The others are switched off here alone: the
dispatcher by a subclass, parameters with every response on the bare loop's wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from unittest import mock

from baton.demo_model import demo_model_folder
from benchmarks.executor_bare import BareLoop
from benchmarks.executor_load import STEP_MS, Load, engine_config, executor_under_load
from benchmarks.executor_plan import Plan
from common.text.tokenizer import load_tokenizer
from executor import channel
from executor.config import ExecutorConfig
from executor.dispatcher import Dispatcher
from executor.ipc import FrameReceiver
from executor.messages import Outputs, ToProxy

NUM_ACTIVE = 64
NUM_COMMON_TOKENS = 2000
"""The first merges of a byte-level vocabulary are its commonest pieces of text."""
SEND_BATCH = ExecutorConfig(send_batch_max=64, send_batch_ms=1.0)


async def params_once(plan: Plan, bare: BareLoop) -> dict[str, float]:
    once, each = await plan.in_turn(
        functools.partial(bare.window, NUM_ACTIVE, STEP_MS, plan.span),
        functools.partial(bare.window, NUM_ACTIVE, STEP_MS, plan.span, has_params=True),
    )
    return {
        f"bare_loop_cpu_us_per_token_{NUM_ACTIVE}_params_once": once.cpu_us_per_token,
        f"bare_loop_cpu_us_per_token_{NUM_ACTIVE}_params_each_time": each.cpu_us_per_token,
        "wire_bytes_per_token_params_once": bare.bytes_per_token(has_params=False),
        "wire_bytes_per_token_params_each_time": bare.bytes_per_token(has_params=True),
    }


async def batched_wakes(plan: Plan) -> dict[str, float]:
    config = engine_config(NUM_ACTIVE, step_ms=STEP_MS)
    async with executor_under_load(config) as batched, contextlib.AsyncExitStack() as stack:
        with mock.patch.object(channel, "Dispatcher", _OneCallEach):
            single = await stack.enter_async_context(executor_under_load(config))
        on, off = await plan.in_turn(
            functools.partial(batched.window, NUM_ACTIVE, plan.span),
            functools.partial(single.window, NUM_ACTIVE, plan.span),
        )
    return {
        f"cpu_us_per_token_{NUM_ACTIVE}_batched_wakes": on.cpu_us_per_token,
        f"cpu_us_per_token_{NUM_ACTIVE}_one_wake_a_token": off.cpu_us_per_token,
        f"added_p50_us_{NUM_ACTIVE}_batched_wakes": on.p50_us,
        f"added_p50_us_{NUM_ACTIVE}_one_wake_a_token": off.p50_us,
    }


async def text(plan: Plan) -> dict[str, float]:
    """The same streams without text, with it, and with a postprocess worker that makes it."""
    model = demo_model_folder()
    tokenizer = load_tokenizer(model)
    configs = [
        engine_config(
            NUM_ACTIVE,
            step_ms=STEP_MS,
            vocab_size=NUM_COMMON_TOKENS,
            model=str(model),
            executor=ExecutorConfig(postprocess_workers=num_workers),
        )
        for num_workers in (0, 1)
    ]
    async with (
        executor_under_load(configs[0]) as silent,
        executor_under_load(configs[0], tokenizer) as speaking,
        executor_under_load(configs[1], tokenizer) as posting,
    ):
        figures = await plan.in_turn(
            *(
                functools.partial(load.window, NUM_ACTIVE, plan.span)
                for load in (silent, speaking, posting)
            )
        )
    kinds = ("without_text", "with_text", "with_text_in_a_postprocess_worker")
    return {
        f"cpu_us_per_token_{NUM_ACTIVE}_{kind}": each.cpu_us_per_token
        for kind, each in zip(kinds, figures, strict=True)
    }


async def batched_sends(plan: Plan) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, executor in (("off", ExecutorConfig()), ("on", SEND_BATCH)):
        config = engine_config(1024, step_ms=0, executor=executor)
        async with executor_under_load(config) as load:
            await load.answer(plan.num_requests)  # warm-up
            metrics |= await _requests(plan, load, name)
    return metrics


async def _requests(plan: Plan, load: Load, name: str) -> dict[str, float]:
    """One token each: alone, one after the other; then all at once."""
    alone_us: list[float] = []
    for _ in range(plan.num_requests):
        start_s = time.monotonic()
        await load.answer(1)
        alone_us.append((time.monotonic() - start_s) * 1e6)
    spans_s: list[float] = []
    cpus_s: list[float] = []
    for _ in range(plan.num_rounds):
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        await load.answer(plan.num_requests)
        spans_s.append(time.monotonic() - start_s)
        cpus_s.append(time.process_time() - start_cpu_s)
    return {
        f"request_alone_p50_us_send_batch_{name}": statistics.median(alone_us),
        f"requests_per_s_send_batch_{name}": plan.num_requests / statistics.median(spans_s),
        f"cpu_us_per_request_send_batch_{name}": statistics.median(cpus_s)
        / plan.num_requests
        * 1e6,
    }


class _OneCallEach(Dispatcher[ToProxy]):
    """Hands the loop each response by a call of its own, as a receiving thread would
    that does not batch."""

    def __init__(
        self,
        receiver: FrameReceiver[ToProxy],
        loop: asyncio.AbstractEventLoop,
        *,
        on_messages: Callable[[list[ToProxy]], None],
        on_crash: Callable[[Exception], None],
        in_turns: Callable[[list[ToProxy]], list[list[ToProxy]]],
    ) -> None:
        def on_each(messages: list[ToProxy]) -> None:
            for message in messages:
                for part in _parts(message):
                    loop.call_soon_threadsafe(on_messages, [part])

        super().__init__(receiver, loop, on_messages=on_each, on_crash=on_crash, in_turns=in_turns)


def _parts(message: ToProxy) -> list[ToProxy]:
    if not isinstance(message, Outputs):
        return [message]
    accepted: list[ToProxy] = [Outputs(message.accepted, ())] if message.accepted else []
    return accepted + [Outputs((), (output,)) for output in message.outputs]
