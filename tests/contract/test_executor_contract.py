"""What every form of the executor must do, over the scripted engine.

One executor (`conftest.py`) serves the whole file: a test that leaves anything
behind makes the next one's audit fail. Cancels have a file of their own.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.executor import ExecutorRequest, GenerationExecutor, TraceFile
from protos.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    NotNowError,
    RequestCancelledError,
    RequestFailedError,
)
from protos.messages import FinishReason, RequestType, SamplingParams
from tests.support.executor_forms import form_of
from tests.support.executor_scripted import (
    CONTRACT,
    REFUSE,
    CharTokenizer,
    audited,
    collect,
    context_request,
    expected,
    request,
    tokens,
)

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]


async def test_one_log_line_says_which_form_and_one_which_launcher(
    opened: Any, cluster: Callable[[], str]
) -> None:
    """With the reason; a form whose world is another process's says nothing of a launcher."""
    told = form_of(opened.name, cluster).told
    assert told
    for pattern, line in zip(told, opened.lines, strict=True):
        assert re.fullmatch(pattern, line), line


async def test_one_request_streams_its_tokens_and_ends_once(executor: GenerationExecutor) -> None:
    chunks = await collect(executor.submit(request(max_tokens=20)))
    assert tokens(chunks) == expected((1, 2, 3), 20)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 20)
    index = offset = 0
    for chunk in chunks:
        assert (chunk.token_index, chunk.text_offset) == (index, offset)
        index += len(chunk.token_ids)
        offset += len(chunk.text)
    await audited(executor)


async def test_many_at_once_each_get_their_own(executor: GenerationExecutor) -> None:
    """Guards: outputs of one step that reach the wrong result."""
    prompts = {f"m{i}": (i, i + 1) for i in range(200)}
    results = {
        name: executor.submit(request(name, prompt, max_tokens=5))
        for name, prompt in prompts.items()
    }
    for name, result in results.items():
        assert tokens(await collect(result)) == expected(prompts[name], 5)
    await audited(executor)


async def test_context_then_generation_equals_one_engine(executor: GenerationExecutor) -> None:
    """Guards: a hand-off that repeats, loses or changes a token, a block or a count."""
    prompt = tuple(range(40))
    context = await collect(executor.submit(context_request("c", prompt)))
    finish = context[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.CONTEXT
    params = finish.context_phase_params
    assert params is not None
    assert params.first_token_ids == tokens(context)
    assert params.first_text_length == sum(len(chunk.text) for chunk in context)
    assert (await audited(executor)).blocks_by_owner["lease"] == 3
    rest = await collect(
        executor.submit(
            ExecutorRequest(
                external_id="g",
                request_type=RequestType.GENERATION_ONLY,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=10, seed=7),
                deadline_s=30,
                context_phase_params=params,
            )
        )
    )
    assert rest[0].token_index == 1
    assert tokens(context) + tokens(rest) == expected(prompt, 10)
    text = "".join(chunk.text for chunk in [*context, *rest])
    assert text == CharTokenizer().decode(expected(prompt, 10))
    generation = rest[-1].finish
    assert generation is not None
    assert generation.usage.completion_tokens == 9
    assert generation.kv.transferred_blocks == 3
    assert generation.kv.transferred_bytes == 3 * params.layout.block_bytes
    disagg_id, token = params.disagg_request_id, params.pull_token
    assert not await executor.renew(disagg_id, b"wrong")
    assert await executor.renew(disagg_id, token)
    assert not await executor.release(disagg_id, b"wrong")
    assert await executor.release(disagg_id, token)
    assert not await executor.release(disagg_id, token)
    assert (await audited(executor)).blocks_by_owner["lease"] == 0


async def test_an_abandoned_lease_ends_without_traffic(executor: GenerationExecutor) -> None:
    """Guards: a lease whose end needs a message to be noticed."""
    await collect(executor.submit(context_request("c", (5, 6), attempt=2)))
    assert (await audited(executor)).blocks_by_owner["lease"] == 1
    await asyncio.sleep(0.6)
    audit = await audited(executor)
    assert audit.blocks_by_owner["lease"] == 0
    assert audit.blocks_by_state["free"] == CONTRACT.kv_cache.num_blocks


async def test_a_stop_string_ends_by_stop_and_drops_the_rest(executor: GenerationExecutor) -> None:
    """Guards: text or tokens after the stop string, and an engine that runs on unseen."""
    prompt = (8, 9)
    ids = expected(prompt, 200)
    text = CharTokenizer().decode(ids)
    stop = text[5:8]
    chunks = await collect(executor.submit(request("s", prompt, max_tokens=200, stop=(stop,))))
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
    num_tokens = text.index(stop) + len(stop)
    assert tokens(chunks) == ids[:num_tokens]
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.finish is not None
    assert (last.finish.reason, last.stop_string) == (FinishReason.STOP, stop)
    assert last.finish.usage.completion_tokens == num_tokens
    assert last.finish.usage.prompt_tokens == 2
    await audited(executor)


async def test_a_stop_string_in_the_context_phase_releases_its_lease(
    executor: GenerationExecutor,
) -> None:
    """Guards: KV pinned for a generation leg that never comes."""
    prompt = (11, 12)
    stop = CharTokenizer().decode(expected(prompt, 1))
    base = context_request("c", prompt, attempt=3)
    sampling = SamplingParams(max_tokens=1, seed=7, stop=(stop,))
    asked = ExecutorRequest(
        external_id="cs",
        request_type=base.request_type,
        prompt_token_ids=prompt,
        sampling=sampling,
        deadline_s=30,
        disagg_request_id=base.disagg_request_id,
    )
    last = (await collect(executor.submit(asked)))[-1]
    assert last.finish is not None
    assert (last.finish.reason, last.stop_string) == (FinishReason.STOP, stop)
    assert last.finish.context_phase_params is None
    assert (await audited(executor)).blocks_by_owner["lease"] == 0


async def test_a_stop_token_ends_by_stop(executor: GenerationExecutor) -> None:
    stop_id = expected((1, 2, 3), 3)[2]
    last = (await collect(executor.submit(request(stop_token_ids=(stop_id,)))))[-1]
    assert last.finish is not None
    assert (last.finish.reason, last.finish.stop_token_id) == (FinishReason.STOP, stop_id)


async def test_refusals_come_as_typed_errors_and_leave_nothing(
    executor: GenerationExecutor,
) -> None:
    """Guards: a refused request that still holds its external id or a ledger entry."""
    with pytest.raises(InvalidRequestError, match="prompt"):
        executor.submit(request(prompt=()))
    with pytest.raises(InvalidRequestError, match=r"sampling\.seed"):
        executor.submit(
            ExecutorRequest(
                external_id="a",
                prompt_token_ids=(1,),
                sampling=SamplingParams(max_tokens=1, seed=-1),
                deadline_s=1,
            )
        )
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        executor.submit(request(max_tokens=100_000))
    with pytest.raises(RequestFailedError, match="refused"):
        await collect(executor.submit(request(prompt=(1, REFUSE))))
    assert executor.find("a") is None
    await audited(executor)


async def test_a_live_external_id_is_unique(executor: GenerationExecutor) -> None:
    first = executor.submit(request("dup", max_tokens=1000))
    with pytest.raises(DuplicateRequestError, match="'dup'"):
        executor.submit(request("dup"))
    assert executor.find("dup") == first.client_id
    first.abort()
    with pytest.raises(RequestCancelledError):
        await collect(first)
    await collect(executor.submit(request("dup")))


async def test_a_deadline_ends_running_and_queued_requests(executor: GenerationExecutor) -> None:
    runners = [
        executor.submit(request(f"d{i}", max_tokens=5000, deadline_s=0.3)) for i in range(66)
    ]
    for runner in runners:
        with pytest.raises(DeadlineExceededError):
            await collect(runner)
    await audited(executor)


async def test_a_slow_consumer_gets_one_merged_chunk(executor: GenerationExecutor) -> None:
    """Guards: a buffer that grows by one object per step for a reader that sleeps."""
    slow = executor.submit(request("slow", max_tokens=50))
    other = await collect(executor.submit(request("other", (4, 4), max_tokens=80)))
    assert tokens(other) == expected((4, 4), 80)
    chunks = await collect(slow)
    assert len(chunks) <= 2
    assert tokens(chunks) == expected((1, 2, 3), 50)


async def test_an_abandoned_reader_can_be_cancelled(executor: GenerationExecutor) -> None:
    """Guards: a cancelled task whose result cannot be read by anyone any more."""
    result = executor.submit(request("t", max_tokens=1000))
    await anext(result)
    task = asyncio.create_task(collect(result))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    result.abort()
    with pytest.raises(RequestCancelledError):
        await collect(result)
    executor.check_health()


# --- what an engine does beside serving ---------------------------------------------


def is_as_told(file: TraceFile) -> bool:
    return Path(file.path).stat().st_size == file.num_bytes > 0


async def test_every_rank_answers_a_collective_call_in_order(executor: GenerationExecutor) -> None:
    """Guards: a call that reaches one rank, overtakes a request, or ends the engine."""
    result = executor.submit(request("beside", max_tokens=5))
    described = await executor.collective_rpc("describe")
    assert [facts["rank"] for facts in described] == list(range(len(described)))
    pids = tuple(facts["pid"] for facts in described)
    assert pids == (executor.worker_pids or (os.getpid(),))
    with pytest.raises(InvalidRequestError, match="no_such_method"):
        await executor.collective_rpc("no_such_method")
    assert tokens(await collect(result)) == expected((1, 2, 3), 5)


async def test_an_engine_sleeps_and_wakes_to_the_same_tokens(executor: GenerationExecutor) -> None:
    """Guards: a request that waits for ever in a sleeping engine, or blocks that never return."""
    free = (await audited(executor)).blocks_by_state
    await executor.sleep()
    was_asleep = executor.is_asleep
    with pytest.raises(NotNowError, match="asleep"):
        await collect(executor.submit(request("early")))
    await executor.wake_up()
    assert (was_asleep, executor.is_asleep) == (True, False)
    assert tokens(await collect(executor.submit(request("late")))) == expected((1, 2, 3), 4)
    assert (await audited(executor)).blocks_by_state == free


async def test_a_profile_leaves_a_file_a_rank(executor: GenerationExecutor, tmp_path: Path) -> None:
    await executor.start_profile(str(tmp_path / "trace.json"))
    await collect(executor.submit(request("profiled", max_tokens=8)))
    files = await executor.stop_profile()
    assert len(files) == len(await executor.collective_rpc("describe"))
    assert all(is_as_told(file) for file in files)


async def test_statistics_come_to_whoever_listens(executor: GenerationExecutor) -> None:
    with executor.subscribe_stats() as steps:
        await collect(executor.submit(request("seen", max_tokens=6)))
        indexes = [(await anext(steps)).step_index for _ in range(5)]
    assert indexes == sorted(set(indexes))
    built = (await executor.audit()).counters["engine_stats_built"]
    await collect(executor.submit(request("unseen")))
    assert (await executor.audit()).counters["engine_stats_built"] == built
