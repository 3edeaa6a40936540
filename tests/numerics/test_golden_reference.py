"""The recorded reference is what `transformers` says today, margins included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.golden import GOLDEN
from tests.support.make_golden import MARGIN_MIN, Reference

NUM_TOKENS = 8
RECORDED = Path(__file__).parents[1] / "support" / "golden_prompts.json"


def test_the_set_is_what_the_comparison_needs() -> None:
    """Lengths around a block of 16 tokens, several blocks, over a thousand; clear margins."""
    lengths = [len(prompt.prompt_ids) for prompt in GOLDEN]
    assert len(GOLDEN) >= 12
    assert {1, 15, 16, 17} <= set(lengths)
    assert sum(length >= 1000 for length in lengths) >= 2
    assert all(prompt.least_margin > MARGIN_MIN for prompt in GOLDEN)
    assert json.loads(RECORDED.read_text())["margin_min"] == MARGIN_MIN


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_transformers_generates_the_recorded_ids() -> None:
    """A golden file that nobody regenerates would hide a changed reference.

    The first tokens of each: the whole file takes a minute on a quiet machine.
    """
    reference = Reference()
    for prompt in GOLDEN:
        output_ids, margin = reference.generate(tuple(prompt.prompt_ids), NUM_TOKENS)
        assert output_ids == prompt.output_ids[:NUM_TOKENS], prompt.name
        assert margin >= prompt.least_margin - MARGIN_MIN, prompt.name
