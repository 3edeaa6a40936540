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


def test_the_example_runs() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "offline.py")],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "The capital of France is Paris" in done.stdout
