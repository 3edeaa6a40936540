"""`baton.LLM` over the scripted engine in a real process: every way to ask, every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from baton import LLM, ChatMessage, SamplingParams
from executor.config import EngineConfig
from protos.errors import (
    BatonError,
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    RequestCancelledError,
    RequestFailedError,
    ServerUnavailableError,
    UnsupportedError,
)
from tests.support.executor_baseline import nothing_left
from tests.support.golden import demo_model
from tests.support.llm_scripted import CRASH, HANG, REFUSE, SEED, expected, letters, make_llm
from tests.support.serving_double import LetterTokenizer

pytestmark = pytest.mark.system
DEATH_S_MAX = 5.0
RPC = {"rpc_address": "127.0.0.1:1"}
POST = {"postprocess_workers": 1}


def many(num: int) -> list[list[int]]:
    """Prompts of two letters, no drill among them."""
    return [[i % 200, i // 200] for i in range(num)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with nothing_left(), make_llm() as llm:
        yield llm


def test_a_text_token_ids_and_a_conversation_are_answered(llm: LLM) -> None:
    done = llm.generate("ab", max_tokens=5, seed=SEED)
    assert done.token_ids == expected("ab", 5)
    assert done.text == letters(done.token_ids)
    assert done.prompt_token_ids == (97, 98)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (2, 5)
    assert (done.seed, done.external_id[:4]) == (SEED, "llm-")
    assert done.timing.total_ms >= done.timing.ttft_ms > 0
    assert llm.generate([97, 98], max_tokens=5, seed=SEED).token_ids == done.token_ids
    for chat in (
        [("user", "hi")],
        [{"role": "user", "content": "hi"}],
        [ChatMessage("user", "hi")],
    ):
        answer = llm.generate(chat, SamplingParams(max_tokens=5, seed=SEED))
        assert answer.token_ids == llm.chat(chat, max_tokens=5, seed=SEED).token_ids
        assert answer.token_ids == expected("user:hi;", 5)


def test_thousands_of_prompts_come_back_in_order(llm: LLM) -> None:
    """Guards: OverloadedError for who hands over more than the engine's queue holds."""
    told: list[tuple[int, int]] = []
    prompts = many(5000)
    done = llm.generate(
        prompts, max_tokens=3, seed=SEED, progress=lambda *n: told.append(n), external_id="many"
    )
    assert [item.token_ids for item in done] == [expected(tuple(p), 3) for p in prompts]
    assert done[4999].external_id == "many-4999"
    assert told == [(i + 1, 5000) for i in range(5000)]


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=SEED) for n in (1, 4)]
    assert [len(item.token_ids) for item in llm.generate(["a", "b"], params)] == [1, 4]
    with pytest.raises(InvalidRequestError, match="2 entries; it must be one for all or 3"):
        llm.generate(["a", "b", "c"], params)
    assert not llm.generate([])


def test_the_first_failure_of_many_is_raised_and_says_which_it_was(llm: LLM) -> None:
    with pytest.raises(RequestFailedError) as raised:
        llm.generate([[1], [1, REFUSE], [2]], max_tokens=3)
    assert raised.value.__notes__ == ["prompts[1] of 3 prompts"]
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[1], [256]], max_tokens=3)


def test_errors_stand_in_their_place_where_that_is_asked(llm: LLM) -> None:
    outcomes = llm.generate(
        [[1], [1, REFUSE], [256], [2]], max_tokens=3, seed=SEED, return_exceptions=True
    )
    assert [type(item).__name__ for item in outcomes] == [
        *("Completion", "RequestFailedError", "InvalidRequestError", "Completion")
    ]
    with pytest.raises(RequestFailedError):  # one prompt is no list
        llm.generate([1, REFUSE], return_exceptions=True)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "prompt", [5, None, b"bytes", {"prompt": "x"}, [1, "a"], [1.5], [[1], 2], [[[1]]]]
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate(prompt, max_tokens=1)


def test_what_does_not_exist_or_cannot_cross_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no option max_new_tokens; did you mean max_to"):
        llm.generate("a", max_new_tokens=5)  # type: ignore[call-overload]
    for field in ("return_generation_logits", "return_context_logits", "multimodal"):
        with pytest.raises(UnsupportedError, match=field):
            llm.generate("a", **{field: True})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("timeout_s", {"timeout_s": 0}),
        ("timeout_s", {"timeout_s": "soon"}),
        ("sampling.top_p", {"top_p": 2.0}),
        ("output_prefix_token_ids", {"output_prefix_token_ids": "ab"}),
        ("external_id", {"external_id": "x" * 300}),
        ("external_id", {"external_id": 5}),
        ("timeout_s", {"timeout_s": 10**400}),
        ("sampling", {"sampling": {"max_tokens": 3}}),
        ("sampling", {"sampling": (SamplingParams() for _ in range(1))}),
        ("sampling", {"sampling": [{}]}),
        ("sampling.temperature", {"temperature": None}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=None)}),  # type: ignore[arg-type]
        ("sampling.top_k", {"top_k": None}),
        ("sampling.stop", {"stop": 5}),
        ("max_unread_tokens", {"max_unread_tokens": "x"}),
        ("max_unread_tokens", {"max_unread_tokens": None}),
        ("return_context_logits", {"return_context_logits": "yes"}),
        ("logits_processor", {"logits_processor": 5}),
    ],
)
def test_each_option_is_judged_by_the_name_it_was_given_by(
    llm: LLM, field: str, options: dict[str, Any]
) -> None:
    """Some came as Python's own errors, from wherever the value was first used."""
    for prompts in ("a", ["a"]):
        with pytest.raises(InvalidRequestError) as raised:
            llm.generate(prompts, **options)
        assert raised.value.field == field


def test_arrays_are_token_ids_too(llm: LLM) -> None:
    rows: Any = np.array([[97, 98], [98, 97]], dtype=np.int32)
    done = llm.generate(rows, max_tokens=3, seed=SEED)
    assert [item.token_ids for item in done] == [expected("ab", 3), expected("ba", 3)]
    assert llm.generate(rows[0], max_tokens=3, seed=SEED).token_ids == expected("ab", 3)


def test_a_stream_can_be_left_early(llm: LLM) -> None:
    whole = expected("xy", 2000)
    seen: list[int] = []
    for chunk in llm.stream("xy", max_tokens=2000, seed=SEED):
        seen += chunk.token_ids
        if len(seen) >= 5:
            break
    gc.collect()
    assert tuple(seen) == whole[: len(seen)]
    chunks = list(llm.stream("xy", max_tokens=40, seed=SEED))
    assert "".join(chunk.text for chunk in chunks) == letters(whole[:40])
    assert chunks[-1].finish is not None


def test_stop_strings_and_an_output_prefix(llm: LLM) -> None:
    whole = expected("go", 60)
    stop = letters(whole[10:12])
    done = llm.generate("go", max_tokens=60, seed=SEED, stop=stop)
    assert done.stop_string == stop
    assert done.text == letters(whole)[: letters(whole).index(stop)]
    rest = llm.generate("go", max_tokens=60, seed=SEED, output_prefix_token_ids=whole[:20])
    assert rest.token_ids == whole[20:]


async def test_a_program_with_a_loop_of_its_own_awaits_and_iterates(llm: LLM) -> None:
    """As in a notebook: a loop runs, and the blocking calls work beside it."""
    results = [llm.generate_async(prompt, max_tokens=4, seed=SEED) for prompt in many(300)]
    done = await asyncio.gather(*results)
    assert [item.token_ids for item in done] == [expected(tuple(p), 4) for p in many(300)]
    streamed = llm.generate_async("as", max_tokens=30, seed=SEED)
    seen = [token async for chunk in streamed for token in chunk.token_ids]
    assert tuple(seen) == expected("as", 30) == (await streamed).token_ids
    assert llm.generate("as", max_tokens=3, seed=SEED).token_ids == expected("as", 3)


def test_results_are_read_by_any_thread(llm: LLM) -> None:
    result = llm.generate_async("th", max_tokens=30, seed=SEED)
    with ThreadPoolExecutor(4) as pool:
        wholes = list(pool.map(lambda _: result.result(30), range(4)))
        each = list(pool.map(lambda i: llm.generate([i], max_tokens=2, seed=SEED), range(20)))
    assert {whole.token_ids for whole in wholes} == {expected("th", 30)}
    assert [item.token_ids for item in each] == [expected((i,), 2) for i in range(20)]


def test_aborts_reach_what_runs_and_what_still_waits(llm: LLM) -> None:
    results = [llm.generate_async(prompt, max_tokens=5000) for prompt in many(200)]
    next(iter(results[0]))
    for result in results:
        result.abort()
    for result in results:
        with pytest.raises(RequestCancelledError):
            result.result(30)
    assert llm.generate("a", max_tokens=1, seed=SEED).token_ids == expected("a", 1)


def test_a_deadline_ends_one_request(llm: LLM) -> None:
    with make_llm(step_ms=20) as slow, pytest.raises(DeadlineExceededError):
        slow.generate("a", max_tokens=5000, timeout_s=0.2)


def test_a_live_external_id_is_refused_and_free_again_later(llm: LLM) -> None:
    first = llm.generate_async("a", max_tokens=5000, external_id="mine")
    second = llm.generate_async("a", external_id="mine")
    with pytest.raises(BatonError, match="'mine' is already running"):
        second.result(30)
    first.abort()
    with pytest.raises(RequestCancelledError):
        first.result(30)
    llm.generate("a", max_tokens=1, external_id="mine")


@contextlib.contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """As by Ctrl-C; not any more once the block was left."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# --- ends ---------------------------------------------------------------------------


def test_shutdown_ends_what_is_open_and_is_safe_twice_from_any_thread() -> None:
    with nothing_left():
        llm = make_llm(step_ms=5)
        results = [llm.generate_async(prompt, max_tokens=5000) for prompt in many(300)]
        next(iter(results[0]))
        threads = [threading.Thread(target=llm.shutdown) for _ in range(3)]
        for thread in threads:
            thread.start()
        for result in results:
            for _ in range(2):
                with pytest.raises(ServerUnavailableError):
                    result.result(30)
        for thread in threads:
            thread.join()
        llm.shutdown()
        with pytest.raises(ServerUnavailableError, match="shut down"):
            llm.generate("a")


async def test_shutdown_from_a_coroutine_leaves_its_loop_free() -> None:
    with nothing_left():
        async with make_llm() as llm:
            assert (await llm.generate_async("a", max_tokens=2)).usage.completion_tokens == 2
        await asyncio.get_running_loop().shutdown_default_executor()


def test_a_dead_engine_fails_everything_once_and_for_ever() -> None:
    """Guards: a batch of which a part hangs when the engine dies under it."""
    with nothing_left():
        llm = make_llm(step_ms=5)
        open_now = [llm.generate_async(prompt, max_tokens=5000) for prompt in many(300)]
        next(iter(open_now[0]))
        (pid,) = llm._executor.worker_pids
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        errors = []
        for result in open_now:
            with pytest.raises(EngineDeadError) as raised:
                result.result(30)
            errors.append(raised.value)
        assert time.monotonic() - began_s < DEATH_S_MAX
        with pytest.raises(EngineDeadError, match=r"SIGKILL|signal 9"):
            llm.generate("a")
        with pytest.raises(EngineDeadError):
            open_now[0].result()
        llm.shutdown()
        llm.shutdown()
        del open_now, errors, raised


def test_an_engine_that_breaks_in_a_batch_is_told_with_its_cause() -> None:
    with nothing_left(), make_llm() as llm:
        outcomes = llm.generate([[1], [CRASH], [2]], max_tokens=3, return_exceptions=True)
        assert isinstance(outcomes[1], EngineDeadError)
        with pytest.raises(EngineDeadError):
            llm.generate([[1], [2]])


def test_an_interrupted_batch_ends_its_requests_and_the_llm_goes_on() -> None:
    """As Ctrl-C does: the exception comes up in the middle of waiting."""
    with nothing_left(), make_llm(step_ms=1) as llm:
        with pytest.raises(KeyboardInterrupt), interrupted(0.3):
            llm.generate(many(400), max_tokens=8000)
        assert llm.generate("a", max_tokens=2, seed=SEED).token_ids == expected("a", 2)
        assert llm._engine._line is not None
        llm._engine._line.check()


def test_who_is_forgotten_goes_away_but_not_before_its_answer() -> None:
    """Guards: an engine that outlives every user, and one that goes with its last name while
    its result is still wanted."""
    with nothing_left():
        assert len(list(make_llm().stream("a", max_tokens=200))) > 0
        gc.collect()


def test_what_cannot_start_says_why_and_leaves_nothing() -> None:
    with nothing_left():
        with pytest.raises(BatonError, match="no such luck"):
            LLM(engine="scripted", scripted={"load_error": "no such luck"})
        for options, words in (
            ({"engin": "scripted"}, "did you mean 'engine'"),
            ({}, "model is empty"),
            ({"model": "/nowhere"}, "/nowhere"),
            ({"engine": "scripted", "executor": "carrier-pigeon"}, "executor.form"),
            ({"config": EngineConfig(), "dtype": "float32"}, "dtype"),
            ({"engine": "scripted", "executor": RPC}, "secret_file is not given"),
            ({"engine": "scripted", "executor": POST, "tokenizer": LetterTokenizer()}, "a path"),
        ):
            with pytest.raises(ConfigError, match=words):
                LLM(**options)
        gc.collect()


def test_text_workers_load_the_tokenizer_that_was_named() -> None:
    """Guards: text by the model's tokenizer where another one was given by path."""
    with nothing_left(), LLM(engine="scripted", executor=POST, tokenizer=demo_model()) as llm:
        done = llm.generate("Hello", max_tokens=5, seed=SEED)
        assert llm.tokenizer is not None
        assert done.text == llm.tokenizer.decode(done.token_ids)
        assert done.prompt_token_ids == llm.tokenizer.encode("Hello")


def test_an_interrupt_while_it_loads_leaves_nothing() -> None:
    with nothing_left():
        with pytest.raises(KeyboardInterrupt), interrupted(0.5):
            LLM(engine="scripted", scripted={"load_ms": 60_000})
        gc.collect()


HEALTH = {"silence_ms": 300, "stall_ms": 300, "give_up_ms": 1500}


def kinds(outcomes: list[Any]) -> list[str]:
    return sorted({type(item).__name__ for item in outcomes})


def test_prompts_that_still_wait_outlive_an_engine_that_stands_still_for_a_while() -> None:
    """Guards: a long batch lost to a moment's stall, though most of it was never at risk."""
    with nothing_left(), make_llm(health={**HEALTH, "give_up_ms": 60_000}, hang_s=1.0) as llm:
        prompts = [[1, HANG], *many(300)]
        outcomes = llm.generate(prompts, max_tokens=2, seed=SEED, return_exceptions=True)
        assert kinds(outcomes) == ["Completion", "ServerUnavailableError"]
        rest = outcomes[-100:]
        assert [item.token_ids for item in rest if not isinstance(item, BatonError)] == [
            expected(tuple(prompt), 2) for prompt in prompts[-100:]
        ]


def test_an_engine_that_hangs_for_good_is_given_up_and_nobody_waits_on() -> None:
    with nothing_left(), make_llm(health=HEALTH) as llm:
        outcomes = llm.generate([[1, HANG], *many(300)], max_tokens=2, return_exceptions=True)
        assert kinds(outcomes) == ["EngineDeadError", "ServerUnavailableError"]
