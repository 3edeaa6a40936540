"""F13: ids that are unknown, missing, come twice or too late kill no loop; each is counted.

Elsewhere an unknown client id killed the dispatcher, and with it every stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from executor.engine.seam import EngineOutput
from executor.messages import Cancel, Outputs, Stop, Submit
from tests.support.fault_clients import Clients
from tests.support.fault_plays import Plays
from tests.support.fault_world import FaultWorld, Frontend


class Hand:
    """Two frontends on one engine, and what a test needs of them."""

    def __init__(self) -> None:
        self.world = FaultWorld()
        self.clients = Clients(self.world)
        self.plays = Plays(self.world, self.clients)
        self.one, self.other = self.world.attach(), self.world.attach()

    def counters(self) -> dict[str, int]:
        return self.one.proxy._requests.ledger.counters()

    def worker_counters(self) -> dict[str, int]:
        return self.world.worker._ledger.counters()

    def ask(self, name: str = "a", max_tokens: int = 3) -> Any:
        told = self.clients.ask(self.one, name, (1, 2), max_tokens, deadline_s=5.0)
        assert told is not None
        return told

    def put_to_worker(self, frontend: Frontend, message: Any) -> None:
        frontend.link.line.messages.append(message)

    def take_answer(self) -> Outputs:
        """One round's answer, not delivered."""
        self.world.take(self.one, 4)
        self.world.round()
        message = self.one.to_proxy.popleft()
        assert isinstance(message, Outputs)
        return message


@pytest.fixture
def hand() -> Iterator[Hand]:
    """Whatever a test did: the next request is served, everything ends, nothing is left."""
    hand = Hand()
    yield hand
    last = hand.ask("last")
    hand.plays.come_to_rest()
    assert last.ends[0] is None
    hand.world.end()


def test_an_answer_to_nobody_is_counted_and_dropped(hand: Hand) -> None:
    """Never minted, of another lane, no id at all: its acceptance and its tokens."""
    for client_id in (17, 0, -1, (1 << 63) - 1, (1 << 48) + 1):
        stray = EngineOutput(request_id=client_id, token_ids=(1,))
        hand.world.tell(hand.one, [Outputs((client_id,), (stray,))])
    assert hand.counters()["unknown"] == 10


def test_an_answer_that_comes_twice_is_one_answer(hand: Hand) -> None:
    told = hand.ask(max_tokens=1)
    answer = hand.take_answer()
    for _ in range(3):
        hand.world.tell(hand.one, [answer])
    assert len(told.chunks) == 1
    assert told.ends == [None]
    counters = hand.counters()
    assert (counters["duplicate"], counters["late"]) == (2, 2)  # its end; its acceptance


def test_what_comes_after_a_deadline_is_late(hand: Hand) -> None:
    told = hand.ask()
    answer = hand.take_answer()
    hand.plays.wait(9.0, is_heard=True)
    assert type(told.ends[0]).__name__ == "DeadlineExceededError"
    hand.world.tell(hand.one, [answer])
    assert told.chunks == []
    assert hand.counters()["late"] == 2


def test_a_lost_answer_costs_its_request_and_no_more(hand: Hand) -> None:
    """A hole in a stream is a failure of that stream, told as such."""
    told = hand.ask()
    hand.take_answer()
    hand.world.tell(hand.one, [hand.take_answer()])
    assert type(told.ends[0]).__name__ == "RequestFailedError"
    assert "tokens from 0 on are missing" in str(told.ends[0])
    told.is_bad = True  # for the history: this failure has its reason
    hand.plays.come_to_the_worker()
    assert hand.worker_counters()["cancelled"] == 1


def test_the_worker_hears_of_ids_that_it_does_not_know(hand: Hand) -> None:
    hand.put_to_worker(hand.one, Cancel(4711))
    hand.put_to_worker(hand.one, Cancel(4711))
    hand.plays.come_to_the_worker()
    counters = hand.worker_counters()
    assert (counters["unknown"], counters["late"]) == (1, 1)


def test_the_worker_gets_a_request_twice(hand: Hand) -> None:
    hand.ask()
    submit = hand.one.link.line.messages[0]
    assert isinstance(submit, Submit)
    for _ in range(2):
        hand.put_to_worker(hand.one, submit)
    hand.plays.come_to_the_worker()
    assert hand.worker_counters()["duplicate"] == 2
    assert hand.world.engine.audit().counters["submitted"] == 1


def test_a_lane_speaks_of_its_own_requests_only(hand: Hand) -> None:
    """Another frontend's id neither ends that frontend's request nor runs one in its name."""
    told = hand.ask(max_tokens=10)
    submit = hand.one.link.line.messages[0]
    assert isinstance(submit, Submit)
    hand.plays.come_to_the_worker()
    client_id = submit.request.request_id
    forged = msgspec.structs.replace(submit.request, request_id=client_id + 1)
    hand.put_to_worker(hand.other, Cancel(client_id))
    hand.put_to_worker(hand.other, Submit(forged, "b"))
    hand.plays.come_to_the_worker()
    assert hand.worker_counters()["foreign"] == 2
    assert hand.world.engine.audit().counters["submitted"] == 1
    assert not told.is_over


def test_only_the_owner_may_stop_the_worker(hand: Hand) -> None:
    told = hand.ask()
    hand.put_to_worker(hand.other, Stop())
    hand.plays.come_to_the_worker()
    assert not hand.world.worker._is_stopped
    hand.plays.let_all_end()
    assert told.ends == [None]
