"""Logits to the caller, logits processors and broken-off answers, against transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.config import EngineConfig
from executor.engine.local import LocalExtras, Logits
from executor.engine.logits import LogitsDesk
from executor.engine.seam import EngineRequest
from protos.errors import InvalidRequestError, OverloadedError
from protos.messages import DisaggRequestId, RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.engine_bench import Bench
from tests.support.engine_drive import engine_config
from tests.support.engine_models import (
    VOCAB_SIZE,
    prompt_of,
    reference_greedy,
    reference_logits,
    reference_model,
    save_checkpoint,
)

PROMPT = tuple(prompt_of(45, seed=8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("llama")


def small_steps(checkpoint: Path) -> EngineConfig:
    """Prefill in chunks of 11 tokens, so that logits come in pieces beside others' tokens."""
    return engine_config(checkpoint, prefill_chunk_tokens=11, max_batch_tokens=24, max_sequences=8)


@pytest.fixture
def bench(checkpoint: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    made = Bench(small_steps(checkpoint))
    yield made
    made.engine.close()
    torch.set_num_threads(threads)


def context_logits(bench: Bench, request_id: int) -> Logits:
    """They come once, with the first token."""
    found = [o.local.context_logits for o in bench.outputs[request_id] if o.local is not None]
    assert all(logits is None for logits in found[1:])
    assert found[0] is not None
    assert found[0].dtype == np.float32
    return found[0]


def generation_logits(bench: Bench, request_id: int) -> Logits:
    rows = [o.local.generation_logits for o in bench.outputs[request_id] if o.local is not None]
    return np.concatenate([row for row in rows if row is not None])


def test_context_logits_are_those_of_transformers(bench: Bench, reference: Any) -> None:
    """Guards the gathering over chunks, and against a prefix cache that leaves holes in it."""
    bench.submit(1, prompt=PROMPT[:30], max_tokens=2)
    bench.run()
    bench.submit(2, prompt=PROMPT[:20], max_tokens=20)
    bench.submit(3, prompt=PROMPT, max_tokens=3, context_logits=True)
    bench.submit(4, prompt=PROMPT[:17], max_tokens=3, context_logits=True, generation_logits=True)
    bench.run()
    for request_id, prompt in ((3, PROMPT), (4, PROMPT[:17])):
        expected = reference_logits(reference, list(prompt)).numpy()
        np.testing.assert_allclose(
            context_logits(bench, request_id), expected, atol=2e-4, rtol=2e-4
        )
        assert bench.tokens(request_id) == reference_greedy(reference, list(prompt), 3)
        finish = bench.outputs[request_id][-1].finish
        assert finish is not None
        assert finish.usage.cached_tokens == 0
    num_rows = len(PROMPT) + 17 + 3
    assert bench.engine.audit().counters["logits_bytes"] == num_rows * VOCAB_SIZE * 4
    assert all(output.local is None for output in bench.outputs[2]), "none for who did not ask"


def test_generation_logits_are_what_tokens_were_chosen_from(bench: Bench, reference: Any) -> None:
    bench.submit(1, prompt=PROMPT, max_tokens=9, generation_logits=True)
    bench.submit(2, prompt=PROMPT[:9], max_tokens=9)
    bench.submit(3, prompt=PROMPT[:12], max_tokens=5, generation_logits=True, temperature=1.0)
    bench.run()
    rows, tokens = generation_logits(bench, 1), bench.tokens(1)
    assert rows.argmax(axis=1).tolist() == tokens
    expected = reference_logits(reference, [*PROMPT, *tokens[:-1]])[-9:].numpy()
    np.testing.assert_allclose(rows, expected, atol=2e-4, rtol=2e-4)
    assert generation_logits(bench, 3).shape == (5, VOCAB_SIZE)


class Banning:
    """Keeps what it was shown."""

    def __init__(self, banned: int) -> None:
        self.banned = banned
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        self.seen.append(tuple(token_ids))
        logits[self.banned] = -np.inf
        return logits


def test_a_processor_changes_what_is_chosen_and_nothing_else(bench: Bench) -> None:
    """Guards the ban, the neighbours in the batch, and that raw logits stay raw."""
    bench.submit(1, prompt=PROMPT, max_tokens=6, generation_logits=True)
    bench.run()
    free = bench.tokens(1)
    processor = Banning(free[0])
    local = LocalExtras(logits_processor=processor)
    bench.submit(2, prompt=PROMPT, max_tokens=6, generation_logits=True, local=local)
    bench.submit(3, prompt=PROMPT, max_tokens=6)
    bench.run()
    banned = bench.tokens(2)
    assert free[0] not in banned
    assert bench.tokens(3) == free
    assert processor.seen == [(*PROMPT, *banned[:count]) for count in range(6)]
    raw = generation_logits(bench, 2)[0]
    assert int(raw.argmax()) == free[0]
    assert int(np.argsort(raw)[-2]) == banned[0]


def test_a_processor_that_fails_ends_its_own_request_alone(bench: Bench) -> None:
    def raises(_token_ids: Sequence[int], _logits: Logits) -> Logits:
        raise KeyError("oh")

    def bans_all(_token_ids: Sequence[int], logits: Logits) -> Logits:
        return np.full_like(logits, -np.inf)

    def shortens(_token_ids: Sequence[int], logits: Logits) -> Logits:
        return logits[:5]

    processors = {1: raises, 2: bans_all, 3: shortens}
    for request_id, processor in processors.items():
        local = LocalExtras(logits_processor=processor)
        bench.submit(request_id, prompt=PROMPT[:9], max_tokens=4, local=local)
    bench.run()
    words = {1: "KeyError", 2: "not finite", 3: "shape"}
    for request_id in processors:
        error = bench.outputs[request_id][-1].error
        assert error is not None
        assert error.kind == "RequestFailedError"
        assert words[request_id] in error.message
    bench.submit(4, prompt=PROMPT[:9], max_tokens=4)
    bench.run()
    assert len(bench.tokens(4)) == 4
    bench.rest()


def test_an_answer_goes_on_with_its_logits(bench: Bench) -> None:
    """Guards rows against tokens that exist: context rows are the prompt's, others are new."""
    bench.submit(1, prompt=PROMPT, max_tokens=10, generation_logits=True)
    bench.run()
    prefix = tuple(bench.tokens(1)[:4])
    bench.submit(
        2,
        prompt=PROMPT,
        max_tokens=10,
        prefix=prefix,
        context_logits=True,
        generation_logits=True,
    )
    bench.run()
    assert bench.tokens(2) == bench.tokens(1)[4:]
    assert context_logits(bench, 2).shape == (len(PROMPT), VOCAB_SIZE)
    np.testing.assert_allclose(
        generation_logits(bench, 2), generation_logits(bench, 1)[4:], atol=2e-4, rtol=2e-4
    )


def test_a_broken_off_answer_is_found_in_the_prefix_cache(bench: Bench) -> None:
    """Guards resuming where the answer ran: its own full blocks are not computed again."""
    bench.submit(1, prompt=PROMPT, max_tokens=30)
    bench.run()
    before = bench.engine.audit().counters["computed_tokens"]
    bench.submit(2, prompt=PROMPT, max_tokens=30, prefix=tuple(bench.tokens(1)[:25]))
    bench.run()
    assert bench.tokens(2) == bench.tokens(1)[25:]
    computed = bench.engine.audit().counters["computed_tokens"] - before
    # 70 tokens known, 64 of them in full blocks; then 4 of the 5 new ones.
    assert computed == 6 + 4
    finish = bench.outputs[2][-1].finish
    assert finish is not None
    assert finish.usage.cached_tokens == len(PROMPT)


def asking(num_prompt: int, request_type: RequestType = RequestType.CONTEXT_ONLY) -> EngineRequest:
    return EngineRequest(
        request_id=1,
        request_type=request_type,
        prompt_token_ids=pack_token_ids((5,) * num_prompt),
        sampling=SamplingParams(max_tokens=1, seed=0),
        deadline_s=1.0,
        disagg_request_id=DisaggRequestId(1, 1, 1),
        return_context_logits=True,
    )


def test_context_logits_are_bounded_before_they_exist() -> None:
    """Guards memory: gigabytes for one long prompt, or for many at once, are refused."""
    desk = LogitsDesk(vocab_size=10, bytes_max=400)
    desk.promise(1, desk.check(asking(6), 6))
    with pytest.raises(InvalidRequestError) as caught:
        desk.check(asking(11), 11)
    assert caught.value.field == "return_context_logits"
    with pytest.raises(OverloadedError):
        desk.check(asking(5), 5)
    desk.forget(1)
    assert desk.check(asking(10), 10) == 400
    with pytest.raises(InvalidRequestError):
        desk.check(asking(1, RequestType.GENERATION_ONLY), 1)


def test_the_longest_answer_goes_on_to_its_last_token(checkpoint: Path) -> None:
    """Guards the limits: prompt and whole answer fill the engine to its last token."""
    threads = torch.get_num_threads()
    bench = Bench(engine_config(checkpoint, num_blocks=5, tokens_per_block=8))
    try:
        bench.submit(1, prompt=PROMPT[:10], max_tokens=30)
        bench.run()
        bench.submit(2, prompt=PROMPT[:10], max_tokens=30, prefix=tuple(bench.tokens(1)[:29]))
        bench.run()
        assert bench.tokens(2) == bench.tokens(1)[29:]
    finally:
        bench.engine.close()
        torch.set_num_threads(threads)
