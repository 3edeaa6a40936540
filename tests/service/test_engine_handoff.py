"""Two engines in one process, the real transceiver between them: hand-offs, aborts, accounts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from executor.engine.seam import EngineAudit
from kv_transfer.inproc import InprocNetwork
from protos.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    KvTransferError,
    RequestCancelledError,
)
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    FinishReason,
    RequestType,
    SamplingParams,
)
from tests.support.engine_drive import Driver, engine_config, make_driver, run_together, settle
from tests.support.engine_models import prompt_of, save_checkpoint

CONTEXT_ONLY, GENERATION_ONLY = RequestType.CONTEXT_ONLY, RequestType.GENERATION_ONLY


@dataclass
class Pair:
    context: Driver
    generation: Driver
    alone: Driver
    ids: Iterator[DisaggRequestId] = field(
        default_factory=lambda: (DisaggRequestId(1, n, 0) for n in itertools.count(1))
    )

    def prefill(self, prompt: list[int], sampling: SamplingParams) -> ContextPhaseParams:
        once = msgspec.structs.replace(sampling, max_tokens=1)
        request_id = self.context.submit(
            prompt, request_type=CONTEXT_ONLY, disagg_id=next(self.ids), sampling=once
        )
        finish = self.context.answer(request_id).finish
        assert finish is not None
        assert finish.reason is FinishReason.CONTEXT
        assert finish.context_phase_params is not None
        assert finish.context_phase_params.usage == finish.usage
        return finish.context_phase_params

    def decode(self, prompt: list[int], params: ContextPhaseParams, s: SamplingParams) -> int:
        return self.generation.submit(
            prompt, request_type=GENERATION_ONLY, params=params, sampling=s
        )

    def settle(self) -> None:
        settle([self.context, self.generation])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def pair(checkpoint: Path) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    network = InprocNetwork()
    config = engine_config(checkpoint, prefill_chunk_tokens=16)
    made = Pair(make_driver(config, network), make_driver(config, network), make_driver(config))
    yield made
    for driver in (made.context, made.generation, made.alone):
        driver.engine.close()
    torch.set_num_threads(threads)


def no_blocks_but_cached(audit: EngineAudit) -> bool:
    by_state = audit.blocks_by_state
    gauges = [audit.counters[name] for name in ("leases", "transfers", "pulls", "operations")]
    return by_state["reserved"] == by_state["live"] == 0 and not any(gauges)


GREEDY = SamplingParams(max_tokens=10, seed=1, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=10, seed=77, temperature=0.9, top_p=0.9, ignore_eos=True)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_prompt", [5, 24, 43])
def test_same_tokens_as_one_engine(pair: Pair, num_prompt: int, sampling: SamplingParams) -> None:
    """Guards the hand-off itself: whole blocks, a partial last one, and the position of the RNG."""
    prompt = prompt_of(num_prompt, seed=num_prompt)
    expected = pair.alone.answer(pair.alone.submit(prompt, sampling=sampling)).token_ids
    params = pair.prefill(prompt, sampling)
    request_id = pair.decode(prompt, params, sampling)
    run_together([pair.context, pair.generation])
    answer = pair.generation.answers[request_id]
    assert answer.first_index == 1
    assert [*params.first_token_ids, *answer.token_ids] == expected
    finish = answer.finish
    assert finish is not None
    assert finish.usage.completion_tokens == 9
    assert finish.kv.transferred_tokens == num_prompt
    assert finish.kv.transferred_blocks == -(-num_prompt // 8)
    pair.settle()
    for driver in (pair.context, pair.generation):
        assert no_blocks_but_cached(driver.engine.audit())


def test_a_second_hand_off_pulls_only_what_is_missing(pair: Pair) -> None:
    """Guards reuse on both sides: cached blocks are neither prefilled nor pulled again."""
    head = prompt_of(24, seed=9)
    for tail, cached, pulled in (([], 0, 24), ([5, 6, 7], 24, 3), ([5, 6, 7], 24, 3)):
        prompt = head + tail
        expected = pair.alone.answer(pair.alone.submit(prompt, sampling=GREEDY)).token_ids
        params = pair.prefill(prompt, GREEDY)
        request_id = pair.decode(prompt, params, GREEDY)
        run_together([pair.context, pair.generation])
        answer = pair.generation.answers[request_id]
        assert [*params.first_token_ids, *answer.token_ids] == expected
        assert params.usage.cached_tokens == cached
        assert answer.finish is not None
        assert answer.finish.kv.transferred_tokens == pulled
        assert answer.finish.kv.reused_tokens == cached
    pair.settle()


def test_a_full_match_still_ends_the_lease(pair: Pair) -> None:
    """Guards the pull of nothing: all blocks are cached, yet the source must hear an ack."""
    prompt = prompt_of(24, seed=12)
    for _ in range(2):
        params = pair.prefill(prompt, GREEDY)
        pair.decode(prompt, params, GREEDY)
        run_together([pair.context, pair.generation])
        pair.settle()
    audit = pair.context.engine.audit()
    assert audit.counters["leases_acked"] == 2


def test_many_at_once(pair: Pair) -> None:
    """Guards accounts under concurrency, more requests than fit at once."""
    prompts = [prompt_of(10 + 3 * n, seed=n) for n in range(12)]
    expected = [pair.alone.answer(pair.alone.submit(p, sampling=GREEDY)).token_ids for p in prompts]
    pending, started = {}, {}
    for index, prompt in enumerate(prompts):
        pending[index] = pair.context.submit(
            prompt, request_type=CONTEXT_ONLY, disagg_id=next(pair.ids), sampling=GREEDY
        )
    for _ in range(4000):
        pair.context.step_or_wait()
        pair.generation.step_or_wait()
        for index, request_id in list(pending.items()):
            finish = pair.context.answers[request_id].finish
            if finish is not None and finish.context_phase_params is not None:
                del pending[index]
                started[index] = pair.decode(prompts[index], finish.context_phase_params, GREEDY)
        if not pending and all(a.is_over for a in pair.generation.answers.values()):
            break
    assert not pending
    for index, request_id in started.items():
        assert pair.generation.answers[request_id].token_ids == expected[index][1:]
    pair.settle()


def test_abort_in_each_state(pair: Pair) -> None:
    """Guards I8: whatever a request is doing, an abort frees all that it holds."""
    prompt = prompt_of(43, seed=3)
    driver = pair.context
    waiting = driver.submit(prompt, request_type=CONTEXT_ONLY, disagg_id=next(pair.ids))
    driver.engine.abort(waiting)
    prefilling = driver.submit(prompt, request_type=CONTEXT_ONLY, disagg_id=next(pair.ids))
    driver.step()
    driver.engine.abort(prefilling)
    decoding = driver.submit(prompt, max_tokens=50)
    for _ in range(6):
        driver.step()
    assert driver.answers[decoding].token_ids
    driver.engine.abort(decoding)
    driver.run()
    for request_id in (waiting, prefilling, decoding):
        answer = driver.answers[request_id]
        assert answer.error is not None
        assert answer.error.kind == RequestCancelledError.__name__
        driver.engine.abort(request_id)
    pair.settle()
    assert no_blocks_but_cached(driver.engine.audit())
    assert not driver.engine.step()


def test_abort_during_a_pull(pair: Pair) -> None:
    """Guards quarantine: the sequence is gone at once, the blocks only after the transfer."""
    prompt = prompt_of(43, seed=6)
    params = pair.prefill(prompt, GREEDY)
    request_id = pair.decode(prompt, params, GREEDY)
    pair.generation.step()
    pair.generation.engine.abort(request_id)
    pair.generation.step()
    error = pair.generation.answers[request_id].error
    assert error is not None
    assert error.kind == RequestCancelledError.__name__
    pair.settle()
    assert no_blocks_but_cached(pair.generation.engine.audit())


def test_an_expired_request_ends_with_its_deadline(pair: Pair) -> None:
    """Guards I7: waiting and pulling requests end by their deadline, without new traffic."""
    request_id = pair.generation.submit([5, 6], deadline_s=0.0)
    assert pair.generation.engine.has_work()
    error = pair.generation.answer(request_id).error
    assert error is not None
    assert error.kind == "DeadlineExceededError"


def test_a_released_lease_frees_its_blocks_and_fails_the_pull(pair: Pair) -> None:
    """Guards release: the router lets go of a hand-off that nobody will take up."""
    prompt = prompt_of(20, seed=8)
    params = pair.prefill(prompt, GREEDY)
    assert pair.context.engine.renew(params.disagg_request_id, params.pull_token)
    assert not pair.context.engine.release(params.disagg_request_id, b"x" * 16)
    assert pair.context.engine.release(params.disagg_request_id, params.pull_token)
    assert not pair.context.engine.release(params.disagg_request_id, params.pull_token)
    settle([pair.context])
    request_id = pair.decode(prompt, params, GREEDY)
    run_together([pair.context, pair.generation])
    error = pair.generation.answers[request_id].error
    assert error is not None
    assert error.kind == KvTransferError.__name__
    pair.settle()


def test_a_lease_expires_by_itself(checkpoint: Path) -> None:
    """Guards cleaning up without traffic: nobody pulls, nobody releases."""
    driver = make_driver(engine_config(checkpoint, lease_ms=50))
    try:
        driver.submit([5, 6, 7], request_type=CONTEXT_ONLY, disagg_id=DisaggRequestId(1, 1, 0))
        driver.run()
        assert driver.engine.audit().blocks_by_owner["lease"] == 1
        settle([driver])
        assert driver.engine.audit().counters["leases_expired"] == 1
    finally:
        driver.engine.close()


def test_a_first_token_that_ends_the_request_leaves_no_lease(pair: Pair) -> None:
    """Guards step 6 of a request's life: no generation leg, so nothing may stay pinned."""
    prompt = prompt_of(20, seed=8)
    first = pair.alone.answer(pair.alone.submit(prompt, max_tokens=1)).token_ids[0]
    sampling = SamplingParams(max_tokens=1, seed=1, stop_token_ids=(first,))
    request_id = pair.context.submit(
        prompt, request_type=CONTEXT_ONLY, disagg_id=next(pair.ids), sampling=sampling
    )
    finish = pair.context.answer(request_id).finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, first)
    assert finish.context_phase_params is None
    assert not pair.context.engine.audit().holders


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_prompt_tokens": 3}, "num_prompt_tokens"),
        ({"prompt_digest": b"x" * 16}, "prompt_digest"),
        ({"transport": "pigeon"}, "transport"),
        ({"first_token_ids": ()}, "first_token_ids"),
        ({"first_token_ids": (100_000,)}, "first_token_ids[0]"),
        ({"layout.tokens_per_block": 16}, "layout.tokens_per_block"),
        ({"layout.model_fingerprint": "other"}, "layout.model_fingerprint"),
    ],
)
def test_params_that_do_not_fit_are_refused_by_name(
    pair: Pair, changes: dict[str, object], field: str
) -> None:
    """Guards against decoding from another prompt's or another model's KV."""
    prompt = prompt_of(20, seed=8)
    params = pair.prefill(prompt, GREEDY)
    for name, value in changes.items():
        head, _, tail = name.partition(".")
        if tail:
            value = msgspec.structs.replace(getattr(params, head), **{tail: value})
        params = msgspec.structs.replace(params, **{head: value})
    with pytest.raises(InvalidRequestError) as caught:
        pair.decode(prompt, params, GREEDY)
    assert caught.value.field == f"context_phase_params.{field}"


def test_a_hand_off_id_is_used_once_at_a_time(pair: Pair) -> None:
    """Guards the holders' names: two leases of one id could not be told apart."""
    disagg_id = next(pair.ids)
    pair.context.submit([5, 6], request_type=CONTEXT_ONLY, disagg_id=disagg_id)
    for _ in range(2):
        with pytest.raises(DuplicateRequestError):
            pair.context.submit([5, 6], request_type=CONTEXT_ONLY, disagg_id=disagg_id)
        pair.context.run()
    with pytest.raises(InvalidRequestError) as caught:
        pair.context.submit([5, 6], request_type=CONTEXT_ONLY)
    assert caught.value.field == "disagg_request_id"


def test_a_dead_source_fails_the_pull(pair: Pair) -> None:
    """Guards I7: the peer is gone, the request hears of it and everything comes back."""
    prompt = prompt_of(20, seed=8)
    params = pair.prefill(prompt, GREEDY)
    pair.context.engine.close()
    request_id = pair.decode(prompt, params, GREEDY)
    error = pair.generation.answer(request_id).error
    assert error is not None
    assert error.kind == KvTransferError.__name__
    settle([pair.generation])
