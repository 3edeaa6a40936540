"""The executor with postprocess workers: the same answers, and what their deaths may cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from baton.demo_model import demo_model_folder
from common.text.tokenizer import load_tokenizer
from executor.config import EngineConfig, ExecutorConfig
from executor.engine.scripted_model import scripted_completion
from executor.executor import GenerationExecutor, GenerationResult
from executor.post.limits import PostLimits
from executor.post.spec import TokenizerSpec
from executor.proxy import Proxy
from protos.errors import (
    ConfigError,
    EngineDeadError,
    PostprocessError,
    RequestCancelledError,
    RequestFailedError,
)
from protos.messages import FinishReason
from protos.tokens import pack_token_ids
from tests.support.attach_world import thread_world
from tests.support.executor_scripted import (
    REFUSE,
    CharTokenizer,
    audited,
    collect,
    config,
    context_request,
    posted,
    request,
    running,
    tokens,
)
from tests.support.text_toys import ByteTokenizer

pytestmark = pytest.mark.system
SLOW = config(step_ms=2.0)
CHARACTERS = "tests.support.executor_scripted:CharTokenizer"
DEATH_S_MAX = 5.0
"""Five times what is promised: within a second of a death on this host."""


BYTES = ByteTokenizer()
"""Made before any count of threads: its library starts some for good."""


def proxy_of(executor: GenerationExecutor) -> Proxy:
    assert isinstance(executor, Proxy)
    return executor


def bucket_of(result: GenerationResult, num_workers: int) -> int:
    return result.client_id % num_workers


async def told(
    executor: GenerationExecutor, stop: tuple[str, ...], num: int, name: str = "t"
) -> list[Any]:
    """What consumers read of several answers, however it was cut into chunks."""
    results = [
        executor.submit(request(f"{name}-{i}", (i, 7), max_tokens=60, stop=stop))
        for i in range(num)
    ]
    ends = []
    for result in results:
        chunks = await collect(result)
        index = offset = 0
        for chunk in chunks:
            assert (chunk.token_index, chunk.text_offset) == (index, offset)
            index += len(chunk.token_ids)
            offset += len(chunk.text)
        text = "".join(chunk.text for chunk in chunks)
        finish = chunks[-1].finish
        assert finish is not None
        usage = (finish.usage.prompt_tokens, finish.usage.completion_tokens)
        stopped_by = chunks[-1].stop_string
        ends.append((tokens(chunks), text, finish.reason, stopped_by, usage))
    return ends


def tokenized(kind: str) -> tuple[EngineConfig, Any, tuple[str, ...]]:
    """The engine, its tokenizer, and stop strings that some of its answers hold."""
    match kind:
        case "characters":
            script = config(vocab_size=40)
            ids = scripted_completion(pack_token_ids((3, 7)), 7, 60, script.scripted)
            return script, CharTokenizer(), (CharTokenizer().decode(ids[10:13]),)
        case "bytes":
            return config(vocab_size=258), BYTES, ("\ufffd\ufffd\ufffd", "a")
        case _:
            folder = demo_model_folder()
            engine = msgspec.structs.replace(config(vocab_size=30_000), model=str(folder))
            return engine, load_tokenizer(folder), ("ing", " the")


@pytest.mark.parametrize(
    ("kind", "numbers"), [("characters", (0, 1, 3)), ("bytes", (0, 2)), ("model", (0, 1))]
)
async def test_the_same_answers_with_any_number_of_workers(
    kind: str, numbers: tuple[int, ...]
) -> None:
    """Guards: half characters and half stop strings at the borders of steps, ends and usage."""
    engine, tokenizer, stop = tokenized(kind)
    ends: list[list[Any]] = []
    for num_workers in numbers:
        async with running(posted(engine, num_workers), tokenizer=tokenizer) as executor:
            assert len(proxy_of(executor).post_pids) == num_workers
            ends.append(await told(executor, stop, 12) + await told(executor, (), 4))
            await audited(executor)
    assert all(answers == ends[0] for answers in ends)
    reasons = {end[2] for end in ends[0]}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_stop_string_stops_the_engine() -> None:
    """Guards: an engine that goes on to max_tokens while its consumer waits for the end."""
    ids = scripted_completion(pack_token_ids((8, 9)), 7, 20, SLOW.scripted)
    stop = CharTokenizer().decode(ids[9:11])
    async with running(posted(SLOW, 1), tokenizer=CharTokenizer()) as executor:
        chunks = await collect(executor.submit(request("s", (8, 9), max_tokens=5000, stop=(stop,))))
        assert tokens(chunks) == ids[:11]
        last = chunks[-1]
        assert last.finish is not None
        assert (last.finish.reason, last.stop_string) == (FinishReason.STOP, stop)
        assert last.finish.usage.completion_tokens == 11
        assert last.finish.usage.prompt_tokens == 2
        assert (await audited(executor)).counters["engine_steps"] < 2500


async def test_sigkill_of_one_with_a_thousand_pending_costs_its_bucket_only() -> None:
    """Guards: who waits for a dead worker, whoever else is made to pay for it, and an engine
    that works on for requests which have failed."""
    async with running(posted(SLOW, 3), tokenizer=CharTokenizer()) as executor:
        proxy = proxy_of(executor)
        lengths = (30, 5000, 30)  # by bucket: the first client id is 1
        results = [
            executor.submit(request(f"r{i}", (i, 1), max_tokens=lengths[(i + 1) % 3]))
            for i in range(1000)
        ]
        lost = [result for result in results if bucket_of(result, 3) == 1]
        kept = [result for result in results if bucket_of(result, 3) != 1]
        await anext(lost[0])
        os.kill(proxy.post_pids[1], signal.SIGKILL)
        killed_at_s = time.monotonic()
        ends = await asyncio.gather(*map(collect, lost), return_exceptions=True)
        assert time.monotonic() - killed_at_s < DEATH_S_MAX
        errors = [end for end in ends if isinstance(end, PostprocessError)]
        assert len(errors) == len(lost)
        assert len({id(error) for error in errors}) == 1
        assert "SIGKILL" in errors[0].message
        assert errors[0].is_retryable
        again = [executor.submit(request(f"n{i}", (i, 2), max_tokens=5)) for i in range(9)]
        for result in (*kept, *again):
            chunks = await collect(result)
            text = "".join(chunk.text for chunk in chunks)
            assert text == CharTokenizer().decode(tokens(chunks))
            assert len(tokens(chunks)) == (30 if result in kept else 5)
        counters = (await audited(executor)).counters
        assert (counters["post_deaths"], counters["post_workers"]) == (1, 3)
        assert counters["proxy_failed"] == len(errors)


async def test_a_stopped_one_is_given_up_and_its_leases_are_released() -> None:
    """Guards KV pinned by context phases whose end lay unread in a dead worker."""
    post = PostLimits(answer_s_max=0.5)
    async with running(posted(SLOW, 2), tokenizer=CharTokenizer(), post=post) as executor:
        stopped = proxy_of(executor).post_pids[0]
        os.kill(stopped, signal.SIGSTOP)
        results = [executor.submit(context_request(f"c{i}", (i, 1), i + 1)) for i in range(8)]
        for result in results:
            if bucket_of(result, 2) == 0:
                with pytest.raises(PostprocessError, match="answered nothing"):
                    await collect(result)
            else:
                finish = (await collect(result))[-1].finish
                assert finish is not None
                params = finish.context_phase_params
                assert params is not None
                await executor.release(params.disagg_request_id, params.pull_token)
        assert (await audited(executor)).blocks_by_owner["lease"] == 0
        assert stopped not in proxy_of(executor).post_pids


async def test_errors_and_cancels_overtake_a_worker_that_stands_still() -> None:
    """Guards: a refusal that waits behind somebody's text; late text that is taken for news."""
    async with running(posted(SLOW, 1), tokenizer=CharTokenizer()) as executor:
        worker = proxy_of(executor).post_pids[0]
        running_one = executor.submit(request("a", max_tokens=1000))
        await anext(running_one)
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(RequestFailedError, match="refused"):
            await collect(executor.submit(request("b", (1, REFUSE))))
        queued = executor.submit(request("c", (4, 5), max_tokens=1000))
        await asyncio.sleep(0.1)
        for result in (running_one, queued):
            result.abort()
            with pytest.raises(RequestCancelledError):
                await collect(result)
        os.kill(worker, signal.SIGCONT)
        assert len(tokens(await collect(executor.submit(request("d", max_tokens=9))))) == 9
        counters = (await audited(executor)).counters
        assert counters["proxy_late"] + counters["post_late"] > 0
        assert (counters["post_live"], counters["post_deaths"]) == (0, 0)


async def test_after_too_many_deaths_this_process_makes_the_text() -> None:
    """Guards: restarts without end, or a bucket that nobody serves any more."""
    post = PostLimits(restarts_max=0)
    async with running(posted(SLOW, 2), tokenizer=CharTokenizer(), post=post) as executor:
        os.kill(proxy_of(executor).post_pids[0], signal.SIGKILL)
        await _until_in_process(executor)
        ids = scripted_completion(pack_token_ids((8, 9)), 7, 90, SLOW.scripted)
        stop = CharTokenizer().decode(ids[20:22])
        for i in range(4):
            chunks = await collect(
                executor.submit(request(f"x{i}", (8, 9), max_tokens=90, stop=(stop,)))
            )
            assert "".join(chunk.text for chunk in chunks) == CharTokenizer().decode(ids[:20])
            assert tokens(chunks) == ids[:22]
        assert (await audited(executor)).counters["post_workers"] == 1


async def _until_in_process(executor: GenerationExecutor) -> None:
    ends_at_s = time.monotonic() + DEATH_S_MAX
    while (await executor.audit()).counters["post_in_process"] == 0:
        assert time.monotonic() < ends_at_s
        await asyncio.sleep(0.01)


async def test_the_engines_death_is_everybodys_with_workers_too() -> None:
    async with running(posted(SLOW, 2), tokenizer=CharTokenizer()) as executor:
        results = [executor.submit(request(f"r{i}", max_tokens=1000)) for i in range(10)]
        await anext(results[0])
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDeadError}


async def test_frontends_on_one_engine_each_have_their_own() -> None:
    """Guards: a step divided by another frontend's number of workers."""
    engine, tokenizer, stop = tokenized("characters")
    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(thread_world(engine))
        ends = []
        for num_workers in (0, 1, 3):
            executor = await GenerationExecutor.create(
                posted(EngineConfig(), num_workers),
                name=f"front-{num_workers}",
                tokenizer=tokenizer,
                tokenizer_spec=TokenizerSpec(factory=CHARACTERS),
                point=rig.point,
            )
            stack.push_async_callback(executor.shutdown)
            assert len(proxy_of(executor).post_pids) == num_workers
            ends.append(asyncio.create_task(told(executor, stop, 6, name=str(num_workers))))
        answers = await asyncio.gather(*ends)
        assert answers[0] == answers[1] == answers[2]


async def test_what_cannot_be_had_is_refused_at_the_start() -> None:
    """Guards: a server that accepts the setting and then makes no text, or makes it here."""
    with pytest.raises(ConfigError, match="no model"):
        await GenerationExecutor.create(posted(config(), 1), name="x")
    custom: Any = CharTokenizer()
    engine = msgspec.structs.replace(posted(config(), 1), model="somewhere")
    with pytest.raises(ConfigError, match="CharTokenizer"):
        await GenerationExecutor.create(engine, name="x", tokenizer=custom)
    with pytest.raises(ConfigError, match=r"postprocess_workers"):
        ExecutorConfig(form="single", postprocess_workers=1).check()


PARENT = """
import asyncio, sys
from tests.support.executor_scripted import CharTokenizer, config, posted, running
async def main():
    engine = posted(config(step_ms=1.0), 2)
    async with running(engine, tokenizer=CharTokenizer()) as executor:
        print(*executor.worker_pids, *executor.post_pids, flush=True)
        await asyncio.sleep(60)
def run():
    asyncio.run(main())
if sys.argv[1] == "thread":
    import threading
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_they_die_with_their_frontend(where: str) -> None:
    """Guards: orphans, and their socket files."""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, where], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not list(Path(tempfile.gettempdir()).glob(f"baton-ipc-{parent.pid}-*"))
