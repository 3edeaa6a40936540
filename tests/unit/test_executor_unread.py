"""A frontend whose messages do not get through, or whose books an exception could upset."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from executor import requests as requests_module
from executor.health import HealthBounds
from executor.ledger import Event, Ledger
from executor.messages import Cancel, Heartbeat
from executor.requests import LiveRequests
from executor.result import GenerationResult
from protos.errors import InvalidRequestError, ServerUnavailableError
from protos.messages import DisaggRequestId
from tests.support.executor_scripted import request
from tests.support.fault_world import SILENCE_S, FaultWorld, Frontend
from tests.unit.test_executor_requests import Queue, requests_on


@pytest.fixture
def world() -> Iterator[FaultWorld]:
    logging.disable(logging.CRITICAL)
    world = FaultWorld()
    yield world
    world.end()
    logging.disable(logging.NOTSET)


def beat(world: FaultWorld, frontend: Frontend, seconds: int) -> None:
    for _ in range(seconds):
        world.loop.pass_time(1.0)
        world.tell(frontend, [Heartbeat(0, is_busy=False)])


def test_a_connection_that_is_cut_is_told_although_the_worker_beats(world: FaultWorld) -> None:
    """A frame over the bound cut the way to the worker: each later request ended by its
    deadline only, while health stayed good."""
    frontend = world.attach()
    proxy, line = frontend.proxy, frontend.link.line
    result = world.loop.do(proxy.submit, request(deadline_s=1000.0))
    line.is_cut = True
    beat(world, frontend, 10)
    world.loop.do(proxy.check_health)  # nothing was to be sent: nothing is known
    world.loop.do(result.abort)
    beat(world, frontend, int(SILENCE_S) + 2)
    assert isinstance(result.error, ServerUnavailableError)
    assert "has not read its queue" in result.error.message
    with pytest.raises(ServerUnavailableError, match="its connection is cut"):
        world.loop.do(proxy.check_health)
    line.is_cut = False
    beat(world, frontend, 2)
    world.loop.do(proxy.check_health)
    proxy._queue_watch.bounds = HealthBounds(silence_s=1.0, stall_s=1.0, give_up_s=3.0)
    world.loop.do(proxy.submit, request("b"))
    line.is_cut = True
    world.loop.do(proxy.abort_request, proxy.find("b"))
    beat(world, frontend, 6)
    assert world.is_dead  # it was given up


def test_a_defect_in_one_tick_does_not_stop_the_next(world: FaultWorld) -> None:
    """A flush that raised ended the timer, and with it every deadline."""
    frontend = world.attach()
    proxy = frontend.proxy
    result = world.loop.do(proxy.submit, request(deadline_s=5.0))

    def broken() -> bool:
        raise RuntimeError("planted")

    frontend.link.requests.flush = broken  # type: ignore[method-assign]
    world.loop.set_exception_handler(lambda _loop, _context: None)
    beat(world, frontend, 2)
    del frontend.link.requests.flush
    beat(world, frontend, 8)
    assert result.error is not None


STEPS = {
    "text": (LiveRequests, "_text_for"),
    "result": (GenerationResult, "__init__"),
    "message": (requests_module, "to_engine_request"),
    "deadline": (LiveRequests, "_push_deadline"),
    "queue": (Queue, "offer"),
}


@pytest.mark.parametrize("step", STEPS)
def test_whatever_raises_in_a_submit_leaves_no_entry(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that could not be encoded left a registered entry for ever: the audit broke, and
    the external id stayed taken."""
    queue = Queue()
    requests = requests_on(queue)

    def broken(*_args: Any, **_more: Any) -> Any:
        raise ArithmeticError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], broken)
        with pytest.raises(ArithmeticError, match="planted"):
            requests.submit(request(), now_s=0.0)
    assert_nothing_is_left(requests)
    requests.submit(request(), now_s=0.0)  # its name is free again
    requests.check()


def test_a_request_that_left_before_the_defect_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue()
    requests = requests_on(queue)
    apply = Ledger.apply

    def broken(self: Ledger, client_id: int, event: Event) -> Any:
        if event is Event.SEND:
            raise ArithmeticError("planted")
        return apply(self, client_id, event)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "apply", broken)
        with pytest.raises(ArithmeticError):
            requests.submit(request(), now_s=0.0)
    assert_nothing_is_left(requests)
    assert [type(message) for message in queue.sent] == [Cancel]


def assert_nothing_is_left(requests: LiveRequests) -> None:
    requests.check()
    assert len(requests) == 0
    assert not any(requests.ledger.entries_by_state().values())


@pytest.mark.parametrize(
    ("field", "name", "arguments"),
    [
        ("disagg_request_id.router_epoch", "release", (DisaggRequestId(1 << 70, 2, 3), b"")),
        ("disagg_request_id", "renew", ((1, 2, 3), b"")),
        ("pull_token", "renew", (DisaggRequestId(1, 2, 3), "text")),
        ("external_id", "abort_named", ("\udc80",)),
        ("external_id", "abort_named", (None,)),
        ("method", "collective_rpc", (5,)),
        ("method", "collective_rpc", ("\udc80",)),
    ],
)
def test_a_control_call_is_judged_before_it_is_queued(
    world: FaultWorld, field: str, name: str, arguments: tuple[Any, ...]
) -> None:
    """An id of 71 bits raised in the queue, and cost everybody the engine."""
    frontend = world.attach()
    with pytest.raises(InvalidRequestError) as raised:
        world.loop.finish(getattr(frontend.proxy, name)(*arguments))
    assert raised.value.field == field
    assert not frontend.link.line.messages
    assert not frontend.proxy._calls.is_waiting


def test_a_shutdown_ends_whatever_fails_in_it(world: FaultWorld) -> None:
    frontend = world.attach()
    result = world.loop.do(frontend.proxy.submit, request())

    async def broken(*, is_well: bool) -> tuple[str, ...]:
        raise RuntimeError("planted")

    frontend.link.stop = broken  # type: ignore[method-assign]
    frontend.link.requests.close()
    world.loop.finish(frontend.proxy.shutdown())
    assert isinstance(result.error, ServerUnavailableError)
