"""The scripted engine on a virtual clock: leases, deadlines, queueing, refusals."""

from __future__ import annotations

import msgspec
import pytest

from executor.config import (
    EngineConfig,
    KvCacheConfig,
    SchedulerConfig,
    ScriptedConfig,
    TransferConfig,
)
from executor.engine.scripted import ScriptedEngine
from executor.engine.scripted_model import scripted_completion
from executor.engine.seam import EngineOutput, EngineRequest
from protos.errors import InvalidRequestError, OverloadedError, RequestCancelledError
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    FinishReason,
    RequestType,
    SamplingParams,
)
from protos.tokens import pack_token_ids

PROMPT = tuple(range(20))
DISAGG = DisaggRequestId(1, 1, 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def make(num_blocks: int = 8, **scheduler: int) -> tuple[ScriptedEngine, Clock]:
    clock = Clock()
    config = EngineConfig(
        engine="scripted",
        kv_cache=KvCacheConfig(num_blocks=num_blocks, tokens_per_block=16, leased_share_max=0.5),
        scheduler=SchedulerConfig(**scheduler),
        transfer=TransferConfig(lease_ms=1000),
    )
    return ScriptedEngine(config, clock=clock, sleep=clock.sleep), clock


def ask(request_id: int = 1, *, max_tokens: int = 4, deadline_s: float = 60.0) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        request_type=RequestType.CONTEXT_AND_GENERATION,
        prompt_token_ids=pack_token_ids(PROMPT),
        sampling=SamplingParams(max_tokens=max_tokens, seed=3),
        deadline_s=deadline_s,
    )


def ask_context(request_id: int = 1, disagg: DisaggRequestId = DISAGG) -> EngineRequest:
    return msgspec.structs.replace(
        ask(request_id, max_tokens=1),
        request_type=RequestType.CONTEXT_ONLY,
        disagg_request_id=disagg,
    )


def run(engine: ScriptedEngine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work():
        outputs.extend(engine.step())
        engine.audit()
    return outputs


def context(engine: ScriptedEngine) -> ContextPhaseParams:
    engine.submit(ask_context())
    finish = run(engine)[-1].finish
    assert finish is not None
    assert finish.context_phase_params is not None
    return finish.context_phase_params


def test_both_legs_give_the_tokens_of_one() -> None:
    """Guards: a scripted hand-off that would hide a router's token error."""
    one, _ = make()
    one.submit(ask(max_tokens=6))
    alone = [token_id for output in run(one) for token_id in output.token_ids]
    assert tuple(alone) == scripted_completion(pack_token_ids(PROMPT), 3, 6, one._script)
    first, _ = make()
    second, _ = make()
    params = context(first)
    second.submit(
        msgspec.structs.replace(
            ask(max_tokens=6),
            request_type=RequestType.GENERATION_ONLY,
            context_phase_params=params,
        )
    )
    outputs = run(second)
    assert outputs[0].token_index == 1
    assert [*params.first_token_ids, *(t for o in outputs for t in o.token_ids)] == alone


def test_a_lease_is_renewed_and_then_expires_by_itself() -> None:
    engine, clock = make()
    params = context(engine)
    clock.now_s = 0.9
    assert engine.renew(DISAGG, params.pull_token)
    clock.now_s = 1.8
    assert not engine.has_work()
    assert engine.next_deadline_s() == pytest.approx(0.1)
    clock.now_s = 2.0
    assert engine.has_work()
    run(engine)
    assert engine.audit().blocks_by_state["free"] == 8
    assert not engine.release(DISAGG, params.pull_token)


def test_no_renewal_outlives_the_requests_deadline() -> None:
    """Guards: a lease that a router renews for ever (DESIGN.md, invariant 13)."""
    engine, clock = make()
    engine.submit(msgspec.structs.replace(ask_context(), deadline_s=1.5))
    finish = run(engine)[-1].finish
    assert finish is not None
    assert finish.context_phase_params is not None
    clock.now_s = 0.9
    assert engine.renew(DISAGG, finish.context_phase_params.pull_token)
    clock.now_s = 1.5
    run(engine)
    assert engine.audit().blocks_by_owner["lease"] == 0


def test_a_release_that_comes_first_refuses_its_request() -> None:
    engine, _ = make()
    assert not engine.release(DISAGG, b"")
    with pytest.raises(RequestCancelledError, match="released before it came"):
        engine.submit(ask_context())


def test_leases_hold_back_contexts_but_not_others() -> None:
    """Guards: leases that fill the pool, so that nothing can ever end."""
    engine, clock = make(num_blocks=8)  # 4 may be leased, 2 per prompt
    for number in (1, 2, 3):
        engine.submit(ask_context(number, DisaggRequestId(1, number, 1)))
    run(engine)
    assert engine.audit().blocks_by_owner["lease"] == 4
    assert engine.load().num_queued == 1
    assert not engine.has_work()
    clock.now_s = 1.0
    assert [output.request_id for output in run(engine)] == [3]


def test_deadlines_end_queued_and_running() -> None:
    engine, clock = make(max_sequences=1)
    engine.submit(ask(1, max_tokens=50, deadline_s=5))
    engine.submit(ask(2, deadline_s=3))
    engine.step()
    clock.now_s = 3.0
    ended = [output for output in engine.step() if output.error is not None]
    assert [(o.request_id, o.error and o.error.kind) for o in ended] == [
        (2, "DeadlineExceededError")
    ]
    clock.now_s = 5.0
    assert [output.request_id for output in run(engine) if output.error] == [1]
    assert engine.audit().blocks_by_state["free"] == 8


def test_an_abort_ends_once_and_tells_what_was_used() -> None:
    engine, _ = make(max_sequences=1)
    engine.submit(ask(1, max_tokens=50))
    engine.submit(ask(2))
    engine.step()
    for request_id in (1, 2, 2, 99):
        engine.abort(request_id)
    outputs = run(engine)
    assert [(o.request_id, o.error and o.error.kind) for o in outputs] == [
        (1, "RequestCancelledError"),
        (2, "RequestCancelledError"),
    ]
    used = outputs[0].finish
    assert used is not None
    assert used.usage.completion_tokens == 1
    engine.abort(1)
    assert not engine.has_work()


def test_what_cannot_ever_be_served_is_refused() -> None:
    engine, _ = make(max_sequences=1, max_queued=1)
    with pytest.raises(InvalidRequestError, match="max_tokens is 200"):
        engine.submit(ask(max_tokens=200))
    params = context(engine)
    wrong = msgspec.structs.replace(params, prompt_digest=b"x")
    with pytest.raises(InvalidRequestError, match="prompt_digest"):
        engine.submit(
            msgspec.structs.replace(
                ask(), request_type=RequestType.GENERATION_ONLY, context_phase_params=wrong
            )
        )
    engine.submit(ask(1))
    with pytest.raises(OverloadedError, match="1 requests wait already"):
        engine.submit(ask(2))
    last = run(engine)[-1].finish
    assert last is not None
    assert last.reason is FinishReason.LENGTH


def test_stamped_tokens_are_the_time_at_their_steps_end() -> None:
    clock = Clock()
    script = ScriptedConfig(stamps_tokens=True, step_ms=250, vocab_size=1 << 30)
    config = EngineConfig(engine="scripted", scripted=script)
    engine = ScriptedEngine(config, clock=clock, sleep=clock.sleep)
    started_at_us = int(clock() * 1e6)
    engine.submit(ask(max_tokens=2))
    token_ids = [token_id for output in run(engine) for token_id in output.token_ids]
    assert token_ids == [started_at_us + 250_000, started_at_us + 500_000]
