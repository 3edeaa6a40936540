"""The scheduler's policies one by one, through the engine's core and its doubles."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.events import LeaseEnded, PullFailed, PullFinished, TransferEnded, TransferStarted
from protos.errors import KvTransferError, OverloadedError
from protos.messages import DisaggRequestId, FinishReason, KvStats, RequestType, SamplingParams
from tests.support.engine_doubles import HandEngine, completion
from tests.support.engine_requests import request_for

CONTEXT_ONLY, GENERATION_ONLY = RequestType.CONTEXT_ONLY, RequestType.GENERATION_ONLY


def disagg_id(request_id: int) -> DisaggRequestId:
    return DisaggRequestId(1, request_id, 0)


def planned(engine: HandEngine) -> list[tuple[int, int, int]]:
    """(request, start, tokens) of each chunk of one step."""
    engine.runner.last = []
    engine.core.step()
    engine.core.check()
    return [(c.sequence.request_id, c.start, c.num_tokens) for c in engine.runner.last]


def test_prefill_is_chunked_and_mixed_with_decode() -> None:
    """Guards the budget: decodes go first, chunks fill the rest, in order of admission."""
    engine = HandEngine(max_batch_tokens=8, prefill_chunk_tokens=5)
    engine.core.submit(request_for(1, [1] * 3))
    assert planned(engine) == [(1, 0, 3)]
    engine.core.submit(request_for(2, [2] * 9))
    engine.core.submit(request_for(3, [3] * 4))
    assert planned(engine) == [(1, 3, 1), (2, 0, 5), (3, 0, 2)]
    assert planned(engine) == [(1, 4, 1), (2, 5, 4), (3, 2, 2)]
    assert planned(engine) == [(1, 5, 1), (2, 9, 1), (3, 4, 1)]


def test_a_request_reserves_all_it_can_need_or_waits() -> None:
    """Guards F32: two half-admitted requests would wait for each other for ever."""
    engine = HandEngine(num_blocks=6)
    engine.core.submit(request_for(1, [1] * 4, max_tokens=13))
    engine.core.submit(request_for(2, [2] * 8, max_tokens=5))
    engine.core.submit(request_for(3, [3] * 2, max_tokens=1))
    planned(engine)
    assert engine.core.audit().sequences_by_state == {"decoding": 1, "waiting": 2}
    engine.core.abort(1)
    assert [chunk[0] for chunk in planned(engine)] == [2, 3]


def test_the_last_token_needs_no_block() -> None:
    """Guards the worst case: prompt and max_tokens may fill the pool to the last slot and one."""
    engine = HandEngine(num_blocks=2)
    engine.core.submit(request_for(1, [1] * 4, max_tokens=4))
    for _ in range(4):
        planned(engine)
    assert not engine.core.has_work()


def test_an_existing_kv_goes_first() -> None:
    """Guards I13: blocks must go to whom the peer's lease waits for."""
    engine = HandEngine(max_sequences=1)
    engine.core.submit(request_for(1, [1] * 4))
    engine.core.submit(request_for(2, [2] * 4, GENERATION_ONLY))
    planned(engine)
    assert list(engine.mover.pulls) == [disagg_id(2)]
    assert engine.core.audit().sequences_by_state == {"pulling": 1, "waiting": 1}


def test_leases_hold_back_context_requests_only_and_never_for_ever() -> None:
    """Guards the cap: beyond it a context_only waits; alone it passes, others pass it by."""
    engine = HandEngine(max_leased_blocks=2)
    engine.core.submit(request_for(1, [1] * 12, CONTEXT_ONLY))
    planned(engine)
    planned(engine)
    assert list(engine.mover.offers) == [disagg_id(1)], "3 blocks pass a cap of 2 when alone"
    engine.core.submit(request_for(2, [2] * 4, CONTEXT_ONLY))
    engine.core.submit(request_for(3, [3] * 4))
    assert [chunk[0] for chunk in planned(engine)] == [3]
    engine.core.abort(3)
    assert planned(engine) == []
    assert not engine.core.has_work(), "a held back request must not keep the loop spinning"
    engine.mover.put(LeaseEnded(disagg_id(1), "acked"))
    assert [chunk[0] for chunk in planned(engine)] == [2]


def test_a_transfer_outlives_its_lease() -> None:
    """Guards I3: after the lease's end the blocks stay held until no operation reads them."""
    engine = HandEngine()
    engine.core.submit(request_for(1, [1] * 6, CONTEXT_ONLY))
    planned(engine)
    engine.mover.put(TransferStarted(disagg_id(1)))
    engine.mover.put(LeaseEnded(disagg_id(1), "expired"))
    planned(engine)
    audit = engine.core.audit()
    assert list(audit.holders.values()) == [(f"transfer:{disagg_id(1)}",)] * 2
    engine.mover.put(TransferEnded(disagg_id(1)))
    planned(engine)
    assert not engine.core.audit().holders


def test_unverified_blocks_are_no_prefix_hits() -> None:
    """Guards F47: blocks reserved for a pull, filled or not, serve nobody until verified."""
    engine = HandEngine()
    prompt = [1] * 8
    engine.core.submit(request_for(1, prompt, GENERATION_ONLY))
    engine.core.submit(request_for(2, [*prompt, 5], max_tokens=3))
    assert planned(engine)[0] == (2, 0, 6)
    engine.mover.put(PullFailed(disagg_id(1), KvTransferError("by hand").to_data()))
    planned(engine)
    engine.core.submit(request_for(3, prompt, GENERATION_ONLY))
    planned(engine)
    assert engine.mover.pulls[disagg_id(3)].positions == (), "the computed ones do serve"


def test_a_pull_brings_only_what_is_missing() -> None:
    """Guards reuse on the generation side, partial last block included."""
    engine = HandEngine()
    for request_id, prompt, positions in ((1, [1] * 8, (0, 1)), (2, [1] * 10, (2,))):
        engine.core.submit(request_for(request_id, prompt, GENERATION_ONLY, max_tokens=3))
        planned(engine)
        pull = engine.mover.pulls[disagg_id(request_id)]
        assert pull.positions == positions
        assert pull.num_source_blocks == -(-len(prompt) // 4)
        engine.mover.put(PullFinished(disagg_id(request_id), KvStats()))
        assert planned(engine) == [(request_id, len(prompt), 1)]
        planned(engine)
    assert pull.num_tokens == 2


def test_verified_blocks_of_an_aborted_pull_are_kept() -> None:
    """Guards reuse: what arrived and was verified is worth keeping, though nobody waits for it."""
    engine = HandEngine()
    engine.core.submit(request_for(1, [1] * 9, GENERATION_ONLY))
    planned(engine)
    engine.core.abort(1)
    planned(engine)
    assert engine.mover.aborted == [disagg_id(1)]
    assert engine.core.audit().blocks_by_owner["transfer"] == 3
    engine.mover.put(PullFinished(disagg_id(1), KvStats()))
    planned(engine)
    assert engine.core.audit().blocks_by_state["cached"] == 2
    assert not engine.core.audit().holders


def test_a_prompt_is_never_reused_whole_where_logits_are_needed() -> None:
    """Guards the first token: with every block cached there would be nothing to compute."""
    engine = HandEngine()
    for expected in ((1, 0, 6), (2, 4, 4)):
        engine.core.submit(request_for(expected[0], [1] * 8, max_tokens=1))
        assert planned(engine)[0] == expected
        planned(engine)


def test_the_queue_is_bounded() -> None:
    """Guards I11: one more is refused, with the numbers."""
    engine = HandEngine(max_queued=2)
    for request_id in (1, 2):
        engine.core.submit(request_for(request_id, [1]))
    with pytest.raises(OverloadedError) as caught:
        engine.core.submit(request_for(3, [1]))
    assert caught.value.limit == "2"


def test_logits_that_are_no_numbers_end_one_request() -> None:
    """Guards the batch and the cache: the others go on, the bad blocks are not kept."""
    engine = HandEngine()
    engine.runner.bad_prompts = [9]
    engine.core.submit(request_for(1, [1] * 4))
    engine.core.submit(request_for(2, [9] * 4))
    outputs = engine.core.step()
    assert [output.error.kind for output in outputs if output.error] == ["RequestFailedError"]
    assert outputs[0].token_ids == tuple(completion([1] * 4, 1))
    assert engine.core.audit().blocks_by_state["cached"] == 0


def test_an_end_of_sequence_ends_with_stop_and_counts() -> None:
    """Guards stop token ids and usage: the stop token itself was streamed and is counted."""
    engine = HandEngine()
    tokens = completion([1] * 4, 3)
    request = request_for(1, [1] * 4, max_tokens=8)
    sampling = SamplingParams(max_tokens=8, seed=0, stop_token_ids=(tokens[2],))
    engine.core.submit(msgspec.structs.replace(request, sampling=sampling))
    outputs = [output for _ in range(3) for output in engine.core.step()]
    finish = outputs[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, tokens[2])
    assert finish.usage.completion_tokens == 3
