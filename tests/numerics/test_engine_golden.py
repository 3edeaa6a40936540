"""The torch engine on the demo model against the pinned greedy tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from protos.messages import RequestType, SamplingParams
from tests.support.engine_drive import Driver, engine_config, make_driver
from tests.support.golden import GOLDEN, demo_model


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    threads = torch.get_num_threads()
    config = engine_config(
        demo_model(), num_blocks=256, tokens_per_block=16, prefill_chunk_tokens=24
    )
    made = make_driver(config)
    yield made
    made.engine.close()
    torch.set_num_threads(threads)


def test_greedy_tokens_equal_the_pinned_ones(driver: Driver) -> None:
    """Guards I9 on real weights: all prompts in one batch, prefill in chunks."""
    ids = [
        driver.submit(
            list(golden.prompt_ids),
            request_type=RequestType.CONTEXT_AND_GENERATION,
            sampling=SamplingParams(max_tokens=len(golden.output_ids), seed=0, ignore_eos=True),
        )
        for golden in GOLDEN
    ]
    driver.run()
    for golden, request_id in zip(GOLDEN, ids, strict=True):
        assert driver.answers[request_id].token_ids == list(golden.output_ids), golden.name
