"""Proxies' books and the worker's loop over the scripted engine, in one thread, under faults.

Several frontends share the engine. Their messages wait until hypothesis delivers
them; the worker may be killed, break in a step or in a submit, stand still; lanes
close; queues fill; deadlines pass; messages come twice, or from nowhere; cancels
overtake their requests. Who is right is judged by tests/support/fault_history.py
from what the consumers saw, and by the books of both sides at rest:
invariants 1 (one answer), 2 (a slot before the request leaves), 5 (late is
harmless), 6 (the first cause, for ever) and 8 (a cancel frees within one step).

test_executor_planted.py plants bugs and asks this machine to find them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.fault_clients import Clients, completion
from tests.support.fault_history import spell
from tests.support.fault_plays import LONG, PLAYS, WAYS, WORKED, Plays
from tests.support.fault_world import REFUSED_ID, FaultWorld

FRONTENDS_MAX = 4
SETTINGS = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # of a busy machine, not of ours
)
picks = st.integers(0, 99)
lanes = st.integers(0, FRONTENDS_MAX - 1)
names = st.sampled_from("abcd")
ways = st.sampled_from(WAYS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every planted death is logged as an error."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class ExecutorMachine(RuleBasedStateMachine):
    """Every deed may be followed by its way, or a part of it. At the end comes a set play."""

    play = "rest"

    def __init__(self) -> None:
        super().__init__()
        self.world = FaultWorld()
        self.clients = Clients(self.world)
        self.history = self.clients.history
        self.plays = Plays(self.world, self.clients)
        for _ in range(2):
            self.world.attach()

    # --- what clients do -------------------------------------------------------------

    @rule(
        lane=lanes,
        name=names,
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        max_tokens=st.sampled_from((1, 2, 3, 5, LONG)),
        stop=st.sampled_from(((), (), (0, 1), (1, 3), (4, 5), (50, 51))),
        has_long=st.booleans(),
        is_lazy=st.booleans(),
        max_unread=st.sampled_from((0, 0, 2)),
        way=ways,
    )
    def submit(
        self,
        lane: int,
        name: str,
        prompt: list[int],
        max_tokens: int,
        stop: tuple[int, ...],
        has_long: bool,
        is_lazy: bool,
        max_unread: int,
        way: int,
    ) -> None:
        """`stop` is cut out of what the engine would say; some of it never comes."""
        frontend = self.world.pick(lane)
        self.clients.ask(
            frontend,
            name,
            tuple(prompt),
            max_tokens,
            stop=spell(completion(tuple(prompt), 60)[slice(*stop)]) if stop else "",
            deadline_s=100.0 if has_long else 2.0,
            is_lazy=is_lazy,
            max_unread=max_unread,
        )
        self.plays.go(frontend, way)

    @rule(lane=lanes, name=names, head=st.integers(0, 9), stops=st.booleans(), way=ways)
    def submit_context(self, lane: int, name: str, head: int, stops: bool, way: int) -> None:
        frontend, prompt = self.world.pick(lane), (head,) * 5
        stop = spell(completion(prompt, 1)) if stops else ""
        self.clients.ask(frontend, name, prompt, 1, kind="context", stop=stop)
        self.plays.go(frontend, way)

    @precondition(lambda self: any(told.lease for told in self.history.told))
    @rule(lane=lanes, pick=picks, max_tokens=st.integers(2, 5), way=ways)
    def take_over(self, lane: int, pick: int, max_tokens: int, way: int) -> None:
        """The generation leg of a context phase that somebody has read."""
        leases = [told.lease for told in self.history.told if told.lease is not None]
        params = leases[pick % len(leases)]
        prompt = self.clients.prompts[params.disagg_request_id]
        frontend = self.world.pick(lane)
        self.clients.ask(frontend, "g", prompt, max_tokens, kind="generation", params=params)
        self.plays.go(frontend, way)

    @rule(lane=lanes, name=names, way=ways)
    def submit_what_the_engine_refuses(self, lane: int, name: str, way: int) -> None:
        frontend = self.world.pick(lane)
        self.clients.ask(frontend, name, (1, REFUSED_ID), 3)
        self.plays.go(frontend, way)

    @rule(lane=lanes, max_tokens=st.sampled_from((1, LONG)), way=ways)
    def submit_many(self, lane: int, max_tokens: int, way: int) -> None:
        """More than the queue to the worker holds."""
        frontend = self.world.pick(lane)
        for number in range(5):
            self.clients.ask(frontend, f"m{number}", (number, lane), max_tokens)
        self.plays.go(frontend, way)

    @precondition(lambda self: self.history.told)
    @rule(pick=picks, overtakes=st.booleans(), way=ways)
    def cancel(self, pick: int, overtakes: bool, way: int) -> None:
        """One of the open ones, or else of those that have ended; maybe once more."""
        open_ones = [told for told in self.history.told if not told.is_over]
        candidates = open_ones or self.history.told
        told = candidates[-1 - pick % len(candidates)]
        self.plays.cancel(told, overtakes=overtakes, way=way)

    @rule(lane=lanes, name=names, way=ways)
    def cancel_by_name(self, lane: int, name: str, way: int) -> None:
        frontend = self.world.pick(lane)
        self.clients.abort_named(frontend, name)
        self.plays.go(frontend, way)

    @rule(lane=lanes, number=st.integers(1, 1 << 40))
    def cancel_what_never_was(self, lane: int, number: int) -> None:
        self.world.loop.do(self.world.pick(lane).proxy.abort_request, (9 << 48) + number)

    @rule()
    def read_on(self) -> None:
        self.clients.read_on()

    # --- the way of messages, and time ---------------------------------------------------

    @rule(lane=lanes, num_messages=st.integers(1, 4))
    def take(self, lane: int, num_messages: int) -> None:
        self.world.take(self.world.pick(lane), num_messages)

    @rule()
    def work(self) -> None:
        self.world.round()

    @rule(lane=lanes, num_messages=st.integers(1, 3))
    def deliver(self, lane: int, num_messages: int) -> None:
        self.world.deliver(self.world.pick(lane), num_messages)

    @rule()
    def come_to_the_worker(self) -> None:
        self.plays.come_to_the_worker()

    @rule(duration_s=st.sampled_from((0.5, 4.0)), is_heard=st.booleans())
    def wait(self, duration_s: float, is_heard: bool) -> None:
        self.plays.wait(duration_s, is_heard=is_heard)

    # --- faults ------------------------------------------------------------------------

    @rule(lane=lanes, num_rounds=st.integers(1, 3))
    def an_answer_comes_twice(self, lane: int, num_rounds: int) -> None:
        frontend = self.world.pick(lane)
        for _ in range(num_rounds):
            if not frontend.to_proxy:
                self.plays.go(frontend, WORKED)
        self.plays.copy_answer(frontend)

    @rule(lane=lanes, num_rounds=st.integers(0, 3))
    def a_message_comes_twice(self, lane: int, num_rounds: int) -> None:
        self.plays.copy_message(self.world.pick(lane), num_rounds)

    @rule(lane=lanes, number=st.integers(0, 40))
    def come_from_nowhere(self, lane: int, number: int) -> None:
        self.plays.stray_answer(self.world.pick(lane), number)

    @rule(lane=st.integers(1, FRONTENDS_MAX - 1), asks=st.booleans(), way=ways)
    def close_lane(self, lane: int, asks: bool, way: int) -> None:
        frontend = self.world.pick(lane)
        if frontend.is_open and frontend.frontend_id:
            self.plays.close_lane(frontend, asks=asks, way=way)

    @precondition(lambda self: len(self.world.frontends) < FRONTENDS_MAX)
    @rule()
    def attach(self) -> None:
        self.world.attach()

    # --- judgement -----------------------------------------------------------------------

    @invariant()
    def all_is_well_told(self) -> None:
        self.clients.check()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                PLAYS[self.play](self.plays)
                self.plays.come_to_rest()
        finally:
            self.world.end()


@pytest.mark.parametrize("play", PLAYS)
def test_no_order_of_events_breaks_the_promises(play: str) -> None:
    machine = type("ExecutorMachine", (ExecutorMachine,), {"play": play})
    run_state_machine_as_test(machine, settings=SETTINGS)
