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
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.engine.seam import EngineOutput
from executor.messages import Cancel, Outputs, Submit
from tests.support.fault_clients import Clients, completion
from tests.support.fault_history import spell
from tests.support.fault_world import (
    GRACE_S,
    HEARTBEAT_S,
    LAST_WORDS_S,
    REFUSED_ID,
    SILENCE_S,
    FaultWorld,
    Frontend,
)

FRONTENDS_MAX = 4
LONG, LEASE_S = 30, 10.0
ROUNDS_TO_REST = 400
RECENT = 6
picks = st.integers(0, 99)
lanes = st.integers(0, FRONTENDS_MAX - 1)
names = st.sampled_from("abcd")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every planted death is logged as an error."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class ExecutorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = FaultWorld()
        self.loop = self.world.loop
        self.clients = Clients(self.world)
        self.history = self.clients.history
        for _ in range(2):
            self.attach()

    # --- what clients do -------------------------------------------------------------

    @rule(
        lane=lanes,
        name=names,
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        max_tokens=st.sampled_from((1, 2, 3, 5, LONG)),
        stop=st.sampled_from(((), (), (0, 1), (1, 3), (4, 5), (50, 51))),
        has_long=st.booleans(),
        is_lazy=st.booleans(),
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
    ) -> None:
        """`stop` is cut out of what the engine would say; some of it never comes."""
        self.clients.ask(
            self.world.pick(lane),
            name,
            tuple(prompt),
            max_tokens,
            stop=spell(completion(tuple(prompt), 60)[slice(*stop)]) if stop else "",
            deadline_s=100.0 if has_long else 2.0,
            is_lazy=is_lazy,
        )

    @rule(lane=lanes, name=names, head=st.integers(0, 9), stops=st.booleans())
    def submit_context(self, lane: int, name: str, head: int, stops: bool) -> None:
        prompt = (head,) * 5
        stop = spell(completion(prompt, 1)) if stops else ""
        self.clients.ask(self.world.pick(lane), name, prompt, 1, kind="context", stop=stop)

    @precondition(lambda self: any(told.lease for told in self.history.told))
    @rule(lane=lanes, pick=picks, max_tokens=st.integers(2, 5))
    def take_over(self, lane: int, pick: int, max_tokens: int) -> None:
        """The generation leg of a context phase that somebody has read."""
        leases = [told.lease for told in self.history.told if told.lease is not None]
        params = leases[pick % len(leases)]
        prompt = self.clients.prompts[params.disagg_request_id]
        frontend = self.world.pick(lane)
        self.clients.ask(frontend, "g", prompt, max_tokens, kind="generation", params=params)

    @rule(lane=lanes, name=names)
    def submit_what_the_engine_refuses(self, lane: int, name: str) -> None:
        self.clients.ask(self.world.pick(lane), name, (1, REFUSED_ID), 3)

    @rule(lane=lanes, max_tokens=st.sampled_from((1, LONG)))
    def submit_many(self, lane: int, max_tokens: int) -> None:
        """More than the queue to the worker holds."""
        for number in range(5):
            self.clients.ask(self.world.pick(lane), f"m{number}", (number, lane), max_tokens)

    @precondition(lambda self: self.history.told)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        """One of the newest: old ones have mostly ended."""
        told = self.history.told
        index = len(told) - 1 - pick % min(len(told), RECENT)
        told[index].was_cancelled = True
        self.loop.do(self.clients.results[index].abort)

    @rule(lane=lanes, number=st.integers(1, 1 << 40))
    def cancel_what_never_was(self, lane: int, number: int) -> None:
        self.loop.do(self.world.pick(lane).proxy.abort_request, (9 << 48) + number)

    @rule()
    def read_on(self) -> None:
        self.clients.read_on()

    # --- the way of messages -----------------------------------------------------------

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
    def turn(self) -> None:
        """As it mostly goes: what was sent is worked on, and answered."""
        for frontend in self.world.all():
            self.world.take(frontend, 4)
        self.world.round()
        for frontend in self.world.all():
            self.world.deliver(frontend)

    @rule()
    def come_to_the_worker(self) -> None:
        """Invariant 8: once a cancel has come to the worker, its next round ends the request."""
        if self.world.is_dead:
            return
        self.world.drain_to_worker()
        self.world.round()
        for frontend in self.world.all():
            self.world.deliver(frontend)
        if not self.world.is_dead:
            self.clients.must_be_over(lambda told: told.was_cancelled, "a round after its cancel")

    @rule(duration_s=st.sampled_from((0.5, 4.0)), is_heard=st.booleans())
    def wait(self, duration_s: float, is_heard: bool) -> None:
        """Time passes; the heart is heard in it, or the worker is stopped."""
        heard_at_s = {f.frontend_id: f.heard_at_s for f in self.world.all()}
        self.world.pass_time(duration_s, is_heard=is_heard)
        now_s = self.loop.time()
        for frontend in self.world.all():
            self._after_silence(frontend, heard_at_s[frontend.frontend_id], now_s)
        late_s = GRACE_S + 2 * HEARTBEAT_S
        self.clients.must_be_over(
            lambda told: told.asked_at_s + told.deadline_s + late_s <= now_s, "overdue"
        )

    def _after_silence(self, frontend: Frontend, heard_at_s: float, now_s: float) -> None:
        if frontend.heard_at_s > heard_at_s or now_s - heard_at_s <= SILENCE_S:
            return
        lane = frontend.frontend_id
        self.history.silences.append((lane, heard_at_s + SILENCE_S, now_s))
        if now_s - heard_at_s > SILENCE_S + 2 * HEARTBEAT_S:
            self.clients.must_be_over(lambda told: told.lane == lane, "long after a silence")

    # --- faults ------------------------------------------------------------------------

    @rule(lane=lanes)
    def come_twice(self, lane: int) -> None:
        """The next message of each direction."""
        frontend = self.world.pick(lane)
        if frontend.to_proxy and isinstance(frontend.to_proxy[0], Outputs):
            frontend.to_proxy.insert(1, frontend.to_proxy[0])
        line = frontend.link.line.messages
        if line and isinstance(line[0], Submit | Cancel):
            line.insert(1, line[0])

    @rule(lane=lanes, number=st.integers(0, 40))
    def come_from_nowhere(self, lane: int, number: int) -> None:
        """What the worker never said, of a request that ended or never was."""
        frontend = self.world.pick(lane)
        client_id = (frontend.frontend_id << 48) + number
        if frontend.proxy._requests.ledger.state(client_id) in (None, "tombstone"):
            stray = EngineOutput(request_id=client_id, token_ids=(1,))
            self.world.tell(frontend, [Outputs((client_id,), (stray,))])

    @rule(lane=lanes)
    def cancel_overtakes(self, lane: int) -> None:
        line = self.world.pick(lane).link.line.messages
        cancels = [message for message in line if isinstance(message, Cancel)]
        if cancels:
            line.remove(cancels[0])
            line.appendleft(cancels[0])

    @precondition(lambda self: len(self.history.told) > 3)
    @rule(where=st.sampled_from(("submit", "step")))
    def break_engine(self, where: str) -> None:
        self.world.engine.breaks_in = where

    @precondition(lambda self: len(self.history.told) > 3)
    @rule()
    def kill(self) -> None:
        self.world.kill()

    @precondition(lambda self: self.world.is_dead)
    @rule()
    def notice(self) -> None:
        """The last words are read between the sight of a death and its handling."""
        self.world.notice()
        for frontend in self.world.all():
            self.world.deliver(frontend)
        self.world.pass_time(2 * LAST_WORDS_S, is_heard=False)
        assert all(frontend.link.dead.done() for frontend in self.world.all())

    @precondition(lambda self: not self.world.is_dead)
    @rule(lane=st.integers(1, FRONTENDS_MAX - 1))
    def close_lane(self, lane: int) -> None:
        frontend = self.world.pick(lane)
        if frontend.is_open and frontend.frontend_id:
            self.world.close_lane(frontend.frontend_id)

    @precondition(lambda self: not self.world.is_dead and len(self.world.frontends) < FRONTENDS_MAX)
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
                self.come_to_rest()
        finally:
            self.world.end()

    def come_to_rest(self) -> None:
        """Liveness: without further faults everything ends, and nothing is left."""
        for _ in range(ROUNDS_TO_REST):
            self.come_to_the_worker()
            if not any(len(frontend.proxy._requests) for frontend in self.world.all()):
                break
        self.come_to_the_worker()  # what the ends themselves had to say
        if self.world.is_dead:
            self.notice()
        self.read_on()
        self.clients.check()
        self.clients.must_be_over(lambda _: True, "at rest")
        self.clients.read_again()
        self.clients.check()
        self.clients.check_books_at_rest()
        if not self.world.is_dead:
            self._check_worker_at_rest()

    def _check_worker_at_rest(self) -> None:
        worker, engine = self.world.worker, self.world.engine
        worker._ledger.check()
        assert len(worker._ledger) == len(worker._names) == 0
        leases = [told.lease for told in self.history.told if told.lease is not None]
        known = {f"lease:{lease.disagg_request_id}" for lease in leases}
        if all(frontend.is_open for frontend in self.world.all()):
            held = {name for names in engine.audit().holders.values() for name in names}
            assert held <= known, f"leased to nobody: {held - known}"
        self.world.pass_time(LEASE_S + 1, is_heard=True)
        self.world.round()
        assert engine.audit().holders == {}
        load = engine.load()
        assert (load.num_queued, load.num_running) == (0, 0)


ExecutorMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestExecutorMachine = ExecutorMachine.TestCase
