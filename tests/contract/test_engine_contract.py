"""The Engine seam's contract, for every implementation (executor/engine/seam.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from executor.config import EngineConfig, KvCacheConfig, ScriptedConfig
from executor.engine.factory import create_engine
from executor.engine.seam import Engine, EngineOutput, EngineRequest
from protos.errors import InvalidRequestError, OverloadedError, RequestError
from protos.messages import DisaggRequestId, FinishReason, RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.engine_drive import engine_config
from tests.support.engine_models import VOCAB_SIZE, save_checkpoint

WAIT_S = 60.0
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


class Bench:
    """One engine, driven as the executor's worker does."""

    def __init__(self, config: EngineConfig) -> None:
        self.woken = threading.Event()
        self.engine: Engine = create_engine(config, self.woken.set)
        self.outputs: dict[int, list[EngineOutput]] = {}

    def submit(
        self,
        request_id: int,
        *,
        prompt: tuple[int, ...] = PROMPT,
        max_tokens: int = 4,
        request_type: RequestType = RequestType.CONTEXT_AND_GENERATION,
        disagg_id: DisaggRequestId | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self.engine.submit(
            EngineRequest(
                request_id=request_id,
                request_type=request_type,
                prompt_token_ids=pack_token_ids(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True),
                deadline_s=deadline_s,
                disagg_request_id=disagg_id,
            )
        )
        self.outputs[request_id] = []

    def step(self) -> None:
        for output in self.engine.step():
            assert not self.is_over(output.request_id), "an output after the last one"
            self.outputs[output.request_id].append(output)

    def is_over(self, request_id: int) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and (outputs[-1].finish is not None or outputs[-1].error is not None)

    def until(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < end_s, "the engine came to no end"
            if self.engine.has_work():
                self.step()
                continue
            due_s = self.engine.next_deadline_s()
            self.woken.wait(0.02 if due_s is None else min(due_s, 0.02))
            self.woken.clear()

    def run(self) -> None:
        self.until(lambda: all(self.is_over(request_id) for request_id in self.outputs))

    def rest(self) -> None:
        """Until no holder is left."""
        self.until(lambda: not self.engine.audit().holders)

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["torch", "scripted"])
def bench(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    if request.param == "torch":
        config = engine_config(checkpoint, lease_ms=60, max_queued=3)
    else:
        base = engine_config(checkpoint, lease_ms=60, max_queued=3)
        config = EngineConfig(
            engine="scripted",
            kv_cache=KvCacheConfig(num_blocks=64, tokens_per_block=8),
            scripted=ScriptedConfig(vocab_size=VOCAB_SIZE, step_ms=0.5),
            scheduler=base.scheduler,
            transfer=base.transfer,
        )
    made = Bench(config)
    yield made
    made.engine.close()
    made.engine.close()
    torch.set_num_threads(threads)


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
