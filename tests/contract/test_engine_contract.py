"""The Engine seam's contract, for every implementation (executor/engine/seam.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.errors import InvalidRequestError, OverloadedError, RequestError, UnsupportedError
from protos.messages import DisaggRequestId, FinishReason, RequestType
from tests.support.engine_bench import PROMPT, Bench, open_bench
from tests.support.engine_models import VOCAB_SIZE, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["torch", "scripted"])
def bench(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Bench]:
    with open_bench(request.param, checkpoint) as made:
        yield made


def test_tokens_come_in_order_and_end_once(bench: Bench) -> None:
    """Guards I1 and the stream: indexes count up, the last output alone has the finish."""
    for request_id in (1, 2, 3):
        bench.submit(request_id, max_tokens=request_id + 2)
    bench.run()
    for request_id in (1, 2, 3):
        outputs = bench.outputs[request_id]
        indexes = [output.token_index for output in outputs]
        assert indexes == list(range(len(indexes)))
        finish = outputs[-1].finish
        assert finish is not None
        assert finish.reason is FinishReason.LENGTH
        assert finish.usage.completion_tokens == len(bench.tokens(request_id)) == request_id + 2
        assert finish.usage.prompt_tokens == len(PROMPT)
    assert bench.tokens(3)[:3] == bench.tokens(1)
    assert not bench.engine.has_work()
    assert bench.engine.next_deadline_s() is None


def test_aborts_are_answered_and_late_ones_ignored(bench: Bench) -> None:
    """Guards I5 and I8: waiting and running requests end by their abort, others by nothing."""
    bench.submit(1, max_tokens=200)
    bench.step()
    bench.step()
    bench.submit(2)
    bench.engine.abort(1)
    bench.engine.abort(2)
    bench.engine.abort(99)
    assert bench.engine.has_work()
    bench.step()
    for request_id in (1, 2):
        error = bench.outputs[request_id][-1].error
        assert error is not None
        assert error.kind == "RequestCancelledError"
        bench.engine.abort(request_id)
    bench.step()
    bench.rest()


def test_a_deadline_ends_a_request(bench: Bench) -> None:
    """Guards I7: the engine itself ends it, and says when it must be stepped for that."""
    bench.submit(1, max_tokens=400, deadline_s=0.05)
    due_s = bench.engine.next_deadline_s()
    assert due_s is not None
    assert due_s <= 0.05
    bench.run()
    error = bench.outputs[1][-1].error
    assert error is not None
    assert error.kind == "DeadlineExceededError"
    bench.rest()


def test_what_can_never_be_served_is_refused_without_an_output(bench: Bench) -> None:
    """Guards refusal as the one answer: `submit` raises and nothing follows."""
    limits = bench.engine.identity.model_info.limits
    refused: list[tuple[str, Callable[[], None]]] = [
        ("prompt", lambda: bench.submit(1, prompt=())),
        ("prompt", lambda: bench.submit(1, prompt=(5,) * limits.max_total_tokens)),
        ("sampling.max_tokens", lambda: bench.submit(1, max_tokens=limits.max_total_tokens)),
        ("token_ids[1]", lambda: bench.submit(1, prompt=(5, VOCAB_SIZE))),
        ("disagg_request_id", lambda: bench.submit(1, request_type=RequestType.CONTEXT_ONLY)),
    ]
    for field, submit in refused:
        with pytest.raises(InvalidRequestError) as caught:
            submit()
        assert caught.value.field == field
    disagg_id = DisaggRequestId(1, 1, 0)
    with pytest.raises(RequestError):
        bench.submit(1, request_type=RequestType.GENERATION_ONLY, disagg_id=disagg_id)
    assert not bench.engine.has_work()
    assert bench.engine.step() == []


def test_the_longest_request_is_served(bench: Bench) -> None:
    """Guards the limits' honesty: what is promised fits, to the last token."""
    limits = bench.engine.identity.model_info.limits
    bench.submit(1, prompt=(5,) * limits.max_prompt_tokens, max_tokens=1)
    bench.run()
    assert bench.outputs[1][-1].finish is not None


def test_a_full_queue_refuses(bench: Bench) -> None:
    """Guards I11."""
    for request_id in (1, 2, 3):
        bench.submit(request_id)
    with pytest.raises(OverloadedError):
        bench.submit(4)
    bench.run()


def test_a_lease_pins_and_ends_by_itself(bench: Bench) -> None:
    """Guards I3 and I7 for hand-offs: named holders, expiry, and a release of what is over."""
    disagg_id = DisaggRequestId(7, 1, 0)
    bench.submit(1, request_type=RequestType.CONTEXT_ONLY, disagg_id=disagg_id, max_tokens=1)
    bench.run()
    finish = bench.outputs[1][-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.CONTEXT
    params = finish.context_phase_params
    assert params is not None
    assert params.first_token_ids == tuple(bench.tokens(1))
    assert params.num_prompt_tokens == len(PROMPT)
    holders = set(bench.engine.audit().holders.values())
    assert holders == {(f"lease:{disagg_id}",)}
    bench.rest()
    assert not bench.engine.release(disagg_id, params.pull_token)
    assert not bench.engine.renew(disagg_id, params.pull_token)


def test_release_and_renew_need_the_token(bench: Bench) -> None:
    """Guards hand-offs from one another: only who knows the pull token may end a lease."""
    disagg_id = DisaggRequestId(7, 2, 0)
    bench.submit(1, request_type=RequestType.CONTEXT_ONLY, disagg_id=disagg_id, max_tokens=1)
    bench.run()
    finish = bench.outputs[1][-1].finish
    assert finish is not None
    assert finish.context_phase_params is not None
    token = finish.context_phase_params.pull_token
    assert not bench.engine.renew(disagg_id, b"no" * 8)
    assert not bench.engine.release(disagg_id, b"no" * 8)
    assert bench.engine.renew(disagg_id, token)
    assert bench.engine.release(disagg_id, token)
    assert not bench.engine.release(disagg_id, token)
    bench.rest()


def test_load_and_audit_return_to_the_start(bench: Bench) -> None:
    """Guards the accounts: after the last request only cached blocks may differ."""
    before = bench.engine.load()
    assert before.blocks_free == before.blocks_total == bench.engine.identity.num_blocks
    bench.submit(1)
    assert bench.engine.load().num_queued + bench.engine.load().num_running == 1
    bench.run()
    after = bench.engine.load()
    assert after.sequence > before.sequence
    assert (after.num_queued, after.num_running, after.tokens_in_flight) == (0, 0, 0)
    assert after.blocks_free == after.blocks_total
    by_state = bench.engine.audit().blocks_by_state
    assert by_state["free"] + by_state["cached"] == after.blocks_total


def test_progress_grows_while_it_works_and_rests_when_it_does_not(bench: Bench) -> None:
    """Guards the watch over a worker: what counts as standing still must not be a long step."""
    before = bench.engine.progress
    bench.submit(1)
    bench.until(lambda: bench.is_over(1))
    after = bench.engine.progress
    assert after > before
    assert bench.engine.progress == after


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_existing", [1, 6, 9])
def test_a_broken_off_answer_goes_on_as_if_unbroken(
    bench: Bench, temperature: float, num_existing: int
) -> None:
    """Guards resuming: an output prefix is neither emitted nor counted nor sampled again.

    6 existing tokens end exactly with a block, 9 lie over its border.
    """
    bench.submit(1, max_tokens=12, temperature=temperature)
    bench.run()
    unbroken = bench.tokens(1)
    prefix = tuple(unbroken[:num_existing])
    bench.submit(2, max_tokens=12, temperature=temperature, prefix=prefix)
    bench.run()
    outputs = bench.outputs[2]
    assert [output.token_index for output in outputs] == list(range(num_existing, 12))
    assert bench.tokens(2) == unbroken[num_existing:]
    finish = outputs[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    assert finish.usage.completion_tokens == 12 - num_existing
    assert finish.usage.prompt_tokens == len(PROMPT)
    assert 0 <= finish.usage.cached_tokens <= len(PROMPT)
    bench.rest()


def test_an_output_prefix_that_cannot_be_is_refused_by_name(bench: Bench) -> None:
    """Guards the prefix's limits: it counts against max_tokens, and hand-offs take none."""
    field = "output_prefix_token_ids"
    with pytest.raises(InvalidRequestError) as caught:
        bench.submit(1, max_tokens=4, prefix=(5, 6, 7, 8))
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError) as caught:
        bench.submit(1, max_tokens=4, prefix=(5, VOCAB_SIZE))
    assert caught.value.field == f"{field}[1]"
    with pytest.raises(UnsupportedError) as unsupported:
        bench.submit(
            1,
            request_type=RequestType.CONTEXT_ONLY,
            disagg_id=DisaggRequestId(7, 3, 0),
            prefix=(5,),
            max_tokens=2,
        )
    assert unsupported.value.field == field
    assert not bench.engine.has_work()
