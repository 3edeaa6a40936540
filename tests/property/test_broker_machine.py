"""The broker's table under any order of events, with an attacker who replays what was sent.

The model knows who was let in and by what; the table may never let anybody else in, never give
a number twice, never answer a request twice, and never forget to close a lane that it opened.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from executor.attach.broker_events import (
    Answer,
    Asked,
    CloseLane,
    Effect,
    Event,
    Knocked,
    LaneGone,
    LaneOpen,
    LaneRefused,
    Left,
    OpenLane,
    ProcessGone,
    Tell,
    WorldDown,
    WorldUp,
)
from executor.attach.broker_table import BrokerBounds, BrokerTable
from executor.attach.messages import PROTOCOL, Attach, Attached, Challenge, Knock, WorldEnded
from executor.world.orders import ProcessName
from protos.errors import OverloadedError

COOKIE_S = 10.0
PROCESS = ProcessName(1, 2, "h")


class BrokerMachine(RuleBasedStateMachine):
    cookies = Bundle("cookies")
    requests = Bundle("requests")
    opening = Bundle("opening")

    def __init__(self) -> None:
        super().__init__()
        bounds = BrokerBounds(cookie_s=COOKIE_S, used_cookies_max=8, opening_max=3, frontends_max=5)
        self.table = BrokerTable({"k": b"k" * 32}, b"c" * 32, bounds)
        self.now_s = 1000.0
        self.num_nonces = 0
        self.let_in: dict[bytes, int] = {}
        """By cookie: each opens one lane at most."""
        self.keys: set[bytes] = set()
        self.num_answers: dict[bytes, int] = {}
        self.open: set[int] = set()
        """Lanes that rank 0 has, or was asked for, and nobody closed."""
        self.live: set[int] = set()
        self.is_down = False

    def feed(self, event: Event) -> list[Effect]:
        effects = self.table.handle(event, self.now_s)
        for effect in effects:
            match effect:
                case OpenLane():
                    assert effect.frontend_id not in self.let_in.values()
                    assert effect.key not in self.keys
                    self.keys.add(effect.key)
                    self.open.add(effect.frontend_id)
                    self.live.add(effect.frontend_id)
                case CloseLane():
                    self.open.discard(effect.frontend_id)
                    self.live.discard(effect.frontend_id)
                case Answer(message=Attached() as attached):
                    count = self.num_answers.get(attached.nonce, 0)
                    self.num_answers[attached.nonce] = count + 1
                case _:
                    pass
        return effects

    @rule(seconds=st.floats(0, 6))
    def time_goes_on(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def world_comes_up(self) -> None:
        if not self.is_down:
            self.feed(WorldUp(PROCESS, ""))

    @rule(target=cookies, route=st.sampled_from([b"a", b"b"]))
    def knock(self, route: bytes) -> Any:
        self.num_nonces += 1
        nonce = self.num_nonces.to_bytes(16, "little")
        (answer,) = self.feed(Knocked(route, "k", Knock(PROTOCOL, nonce)))
        assert isinstance(answer, Answer)
        if isinstance(answer.message, Challenge):
            return route, nonce, answer.message.cookie, self.now_s
        return multiple()

    @rule(target=opening, cookie=cookies, as_route=st.sampled_from([b"a", b"b"]))
    def ask(self, cookie: Any, as_route: bytes) -> Any:
        """By the one who was challenged, or by somebody who listened; the first time, or again."""
        route, nonce, value, made_at_s = cookie
        message = Attach(nonce, value, "f", PROCESS, 1.0, 0)
        effects = self.feed(Asked(as_route, "k", message))
        wishes = [effect for effect in effects if isinstance(effect, OpenLane)]
        if not wishes:
            return multiple()
        assert as_route == route
        assert value not in self.let_in
        assert self.now_s - made_at_s <= COOKIE_S + 1e-3
        assert not self.is_down
        self.let_in[value] = wishes[0].frontend_id
        return wishes[0].frontend_id

    @rule(frontend_id=consumes(opening), is_refused=st.booleans())
    def lane_is_answered(self, frontend_id: int, is_refused: bool) -> None:
        was_live = self.table.frontend(frontend_id) is not None
        if is_refused:
            self.open.discard(frontend_id)
            self.live.discard(frontend_id)
            event: Event = LaneRefused(frontend_id, OverloadedError("full").to_data())
        else:
            event = LaneOpen(frontend_id, "q", "r")
        assert bool(self.feed(event)) == was_live

    @rule(frontend_id=st.integers(1, 12), how=st.sampled_from([Left, LaneGone, ProcessGone]))
    def leave(self, frontend_id: int, how: Any) -> None:
        if how is LaneGone:
            self.open.discard(frontend_id)
            self.live.discard(frontend_id)
        self.feed(Left(b"a", frontend_id) if how is Left else how(frontend_id))
        assert self.table.frontend(frontend_id) is None

    @rule()
    def world_ends(self) -> None:
        was_open = {f for f in self.live if self.table.frontend(f) is not None}
        effects = self.feed(WorldDown("it was killed"))
        told = {e.frontend_id for e in effects if isinstance(e, Tell)}
        assert told <= was_open
        assert all(isinstance(e.message, WorldEnded) for e in effects if isinstance(e, Tell))
        self.is_down = True
        self.open.clear()  # with their world
        self.live.clear()

    @invariant()
    def books_agree(self) -> None:
        self.table.check()
        assert self.live == self.open
        known = {f for f in range(1, self.table._next_id) if self.table.frontend(f) is not None}
        assert known == self.live
        assert all(count == 1 for count in self.num_answers.values())


BrokerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBrokerMachine = BrokerMachine.TestCase
