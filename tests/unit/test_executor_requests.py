"""The proxy's table of live requests, on a queue that answers on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from executor.engine.seam import EngineFinish, EngineOutput
from executor.ledger import State
from executor.messages import Cancel, Release, Submit, ToWorker
from executor.requests import LiveRequests
from protos.errors import OverloadedError, RequestFailedError, ServerUnavailableError
from protos.messages import ContextPhaseParams, DisaggRequestId, FinishReason, Usage
from tests.support.executor_scripted import (
    CharTokenizer,
    collect,
    context_request,
    request,
    tokens,
)
from tests.support.serving_double import hand_off

USAGE = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=1)


class Queue:
    """Takes everything, or nothing; `requests` is set by the test."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.sent: list[ToWorker] = []
        self.requests: LiveRequests | None = None

    def put(self, message: ToWorker) -> None:
        self.sent.append(message)

    def offer(self, message: ToWorker) -> bool:
        return self.has_room


class AnsweringQueue(Queue):
    """An engine so fast that its answer is there before `submit` returns."""

    def offer(self, message: ToWorker) -> bool:
        assert self.requests is not None
        assert isinstance(message, Submit)
        client_id = message.request.request_id
        assert self.requests.ledger.state(client_id) is State.REGISTERED
        assert len(self.requests) == 1
        return super().offer(message)


def requests_on(queue: Any, tokenizer: Any = None) -> LiveRequests:
    queue.requests = LiveRequests(queue, tokenizer, tombstones_max=16, grace_s=1.0)
    return cast(LiveRequests, queue.requests)


def last(client_id: int, params: ContextPhaseParams | None = None) -> EngineOutput:
    reason = FinishReason.LENGTH if params is None else FinishReason.CONTEXT
    finish = EngineFinish(reason=reason, usage=USAGE, context_phase_params=params)
    return EngineOutput(request_id=client_id, token_ids=(9,), finish=finish)


async def test_a_result_slot_stands_before_the_request_leaves() -> None:
    """Guards invariant 2: an answer that finds no slot is lost, and its client waits."""
    requests = requests_on(AnsweringQueue())
    result = requests.submit(request(), now_s=0.0)
    requests.on_outputs((last(result.client_id),))
    assert tokens(await collect(result)) == (9,)
    requests.check()


def test_a_request_that_cannot_leave_leaves_no_slot() -> None:
    requests = requests_on(Queue(has_room=False))
    with pytest.raises(OverloadedError):
        requests.submit(request(), now_s=0.0)
    assert len(requests) == 0
    requests.check()


async def test_what_a_failed_request_still_yields_is_counted_and_its_lease_let_go() -> None:
    """Guards blocks leased to nobody by a context phase that its worker finished after it
    had been stopped, and its request had failed."""
    queue = Queue()
    requests = requests_on(queue)
    context = context_request("c", (1, 2, 3))
    result = requests.submit(context, now_s=0.0)
    requests.fail_all(ServerUnavailableError("silent"), cancel=True)
    requests.on_outputs((last(result.client_id, hand_off(context, 9)),))
    assert queue.sent == [Cancel(result.client_id), Release(0, DisaggRequestId(1, 2, 1), b"pull")]
    assert requests.ledger.num_duplicate == 1
    with pytest.raises(ServerUnavailableError, match="silent"):
        await collect(result)


async def test_an_end_that_comes_twice_does_not_take_back_the_lease_of_the_first() -> None:
    """Guards a lease that was released while the generation server was about to pull: the
    second copy of a context phase's end looked like one that nobody had read."""
    queue = Queue()
    requests = requests_on(queue)
    context = context_request("c", (1, 2, 3))
    result = requests.submit(context, now_s=0.0)
    for _ in range(2):
        requests.on_outputs((last(result.client_id, hand_off(context, 9)),))
    assert queue.sent == []
    assert requests.ledger.num_duplicate == 1
    assert tokens(await collect(result)) == (9,)


def test_a_message_that_comes_twice_crashes_nothing() -> None:
    """Guards the dispatcher's life: a second acceptance was taken for our own mistake."""
    requests = requests_on(Queue())
    client_id = requests.submit(request(), now_s=0.0).client_id
    for _ in range(2):
        requests.on_accepted(client_id)
        requests.on_outputs((EngineOutput(request_id=client_id, token_ids=(5,)),))
    assert requests.ledger.state(client_id) is State.STREAMING
    assert requests.ledger.num_duplicate == 1


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class OddTokenizer(CharTokenizer):
    def decode(self, token_ids: Sequence[int]) -> str:
        if 9 in token_ids:
            raise OddError
        return super().decode(token_ids)


async def test_a_tokenizers_error_that_has_no_text_ends_its_request_alone() -> None:
    """Bug: the `__str__` of a tokenizer's exception raised while its request's failure was worded,
    and that ended the reader of all results, and so the engine."""
    requests = requests_on(Queue(), OddTokenizer())
    result = requests.submit(request(), now_s=0.0)
    requests.on_outputs((last(result.client_id),))
    with pytest.raises(RequestFailedError, match=r"failed: OddError$"):
        await collect(result)
    requests.check()
