"""`baton.LLM` with the demo model: the tokens of the reference, and the example as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton import LLM
from protos.messages import FinishReason
from tests.support.executor_baseline import nothing_left
from tests.support.golden import GOLDEN, demo_engine

pytestmark = pytest.mark.system
SHORT = [prompt for prompt in GOLDEN if len(prompt.prompt_ids) <= 64]


def test_golden_tokens_and_texts_come_out_of_one_call() -> None:
    """Invariant 9 through the offline API: batched together, greedy tokens are one engine's."""
    with nothing_left(), LLM(**demo_engine()) as llm:
        done = llm.generate([prompt.prompt_ids for prompt in SHORT], max_tokens=32, ignore_eos=True)
        assert len(done) >= 4
        for item, prompt in zip(done, SHORT, strict=True):
            assert list(item.token_ids) == prompt.output_ids, prompt.name
            assert item.text == prompt.output_text, prompt.name
        answer = llm.chat([("user", "What is the capital of France?")], max_tokens=16)
        assert "Paris" in answer.text
        assert answer.finish_reason is FinishReason.STOP
        prompt = SHORT[0]
        begun = llm.generate(
            prompt.prompt_ids,
            max_tokens=32,
            ignore_eos=True,
            output_prefix_token_ids=prompt.output_ids[:10],
        )
        assert list(begun.token_ids) == prompt.output_ids[10:]


IN_ONE_PROCESS = """
import numpy as np
import asyncio, time
from baton import LLM
from protos.errors import RequestFailedError, ServerUnavailableError, WrongThreadError
from tests.support.golden import GOLDEN, demo_engine

prompt = min(GOLDEN, key=lambda item: abs(len(item.prompt_ids) - 15))
first = prompt.output_ids[0]

def ban(token_ids, logits):
    logits[first] = -np.inf
    return logits

with LLM(executor="single", **demo_engine()) as llm:
    plain = llm.generate(prompt.prompt_ids, max_tokens=8, ignore_eos=True)
    asked = {"return_generation_logits": True, "return_context_logits": True}
    done = llm.generate(prompt.prompt_ids, max_tokens=8, ignore_eos=True, **asked)
    assert list(plain.token_ids) == list(done.token_ids) == prompt.output_ids[:8]
    assert plain.context_logits is plain.generation_logits is None
    vocab_size = llm.limits.vocab_size
    assert done.context_logits.shape == (len(prompt.prompt_ids), vocab_size)
    assert done.generation_logits.argmax(1).tolist() == prompt.output_ids[:8]
    assert done.context_logits[-1].argmax() == first
    stop = prompt.output_text[:4]
    cut = llm.generate(prompt.prompt_ids, max_tokens=8, stop=stop, **asked)
    assert cut.generation_logits.shape == (len(cut.token_ids), vocab_size)
    banned = llm.generate(prompt.prompt_ids, max_tokens=3, logits_processor=ban)
    assert first not in banned.token_ids
    try:
        llm.generate(prompt.prompt_ids, logits_processor=lambda ids, logits: logits[:5])
    except RequestFailedError as error:
        print(error.message)
    refused = []
    waits = (
        lambda: llm.generate("x", max_tokens=1),
        lambda: next(llm.stream("x", max_tokens=1)),
        lambda: llm.generate_async("x", max_tokens=1).result(),
        lambda: asyncio.run(llm.generate_async("x", max_tokens=1).aresult()),
        llm.list_loras,
    )
    def wait(token_ids, logits):
        for call in waits:
            try:
                call()
            except WrongThreadError:
                refused.append(call)
        return logits
    innocent = llm.generate_async(prompt.prompt_ids, max_tokens=30, ignore_eos=True)
    assert len(llm.generate(prompt.prompt_ids, max_tokens=1, logits_processor=wait).token_ids) == 1
    assert refused == list(waits)
    assert len(innocent.result(30).token_ids) == 30
    started_s = time.monotonic()
    try:
        llm.generate(prompt.prompt_ids, logits_processor=lambda _, logits: llm.shutdown() or logits)
    except ServerUnavailableError:
        assert time.monotonic() - started_s < 30
        print("shut down from within")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).resolve().parents[2],
    )


def test_logits_and_processors_work_in_one_process() -> None:
    """In a process of its own: it loads torch and sets its threads. Bug: a processor that asked
    its own LLM for an answer held the engine up until every open request failed for it."""
    done = run("-c", IN_ONE_PROCESS)
    assert done.returncode == 0, done.stderr
    assert "shut down from within" in done.stdout
    assert "the logits processor failed" in done.stdout


def test_the_example_runs() -> None:
    done = run("examples/offline.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The capital of France is Paris" in done.stdout
