"""The broker's decisions, event by event: who gets in, once, and what is left of whom."""

from __future__ import annotations

from typing import Any

import pytest

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
    Unwatch,
    Watch,
    WorldDown,
    WorldUp,
)
from executor.attach.broker_table import FRONTENDS_END, BrokerBounds, BrokerTable
from executor.attach.keys import lane_key
from executor.attach.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Challenge,
    GoodbyeAck,
    Knock,
    Refused,
    Wait,
    WorldEnded,
)
from executor.world.orders import ProcessName
from protos.errors import EngineDeadError, OverloadedError

KEYS = {"k1": b"1" * 32, "k0": b"0" * 32}
LEADER = ProcessName(10, 100, "here")
CHILD = ProcessName(20, 200, "here")


class Desk:
    """A table, and a caller that plays by the rules."""

    def __init__(self, *, is_up: bool = True, **bounds: Any) -> None:
        self.table = BrokerTable(KEYS, b"c" * 32, BrokerBounds(**bounds))
        self.num_nonces = 0
        if is_up:
            self.feed(WorldUp(LEADER, ""))

    def feed(self, event: Event, now_s: float = 0.0) -> list[Effect]:
        effects = self.table.handle(event, now_s)
        self.table.check()
        return effects

    def nonce(self) -> bytes:
        self.num_nonces += 1
        return self.num_nonces.to_bytes(16, "little")

    def knock(self, nonce: bytes, route: bytes = b"r", now_s: float = 0.0) -> Any:
        (answer,) = self.feed(Knocked(route, "k1", Knock(PROTOCOL, nonce)), now_s)
        assert isinstance(answer, Answer)
        return answer.message

    def request(self, nonce: bytes, cookie: bytes, **more: Any) -> Attach:
        fields: dict[str, Any] = {"beat_s": 1.0, "num_buckets": 0, **more}
        return Attach(nonce, cookie, "front", CHILD, **fields)

    def ask(self, route: bytes = b"r", now_s: float = 0.0, **more: Any) -> list[Effect]:
        nonce = self.nonce()
        challenge = self.knock(nonce, route, now_s)
        assert isinstance(challenge, Challenge)
        request = self.request(nonce, challenge.cookie, **more)
        return self.feed(Asked(route, "k1", request), now_s)

    def attach(self, route: bytes = b"r") -> int:
        (wish,) = self.ask(route)
        assert isinstance(wish, OpenLane)
        self.feed(LaneOpen(wish.frontend_id, "q", "r"))
        return wish.frontend_id


def test_a_frontend_gets_a_number_a_key_of_its_own_and_what_it_must_know() -> None:
    desk = Desk(heartbeat_s=0.5)
    nonce = desk.nonce()
    challenge = desk.knock(nonce)
    request = desk.request(nonce, challenge.cookie, num_buckets=2)
    (wish,) = desk.feed(Asked(b"r", "k1", request))
    key = lane_key(KEYS["k1"], nonce, challenge.cookie, 1)
    assert wish == OpenLane(1, key, 10.0, 2)
    effects = desk.feed(LaneOpen(1, "q", "r"))
    assert effects == [
        Watch(1, CHILD),
        Answer(b"r", "k1", Attached(nonce, 1, "q", "r", LEADER, "", 0.5, 10.0)),
    ]
    assert desk.table.counters()["attached"] == 1


def test_a_slow_heart_gets_a_longer_silence_and_nonsense_is_bounded() -> None:
    """Guards: a lane that is closed between two beats, or never."""
    desk = Desk()
    wishes = [desk.ask(beat_s=beat_s, num_buckets=99)[0] for beat_s in (-5.0, 20.0, 1e9)]
    silences = [wish.silence_s for wish in wishes if isinstance(wish, OpenLane)]
    assert silences == [10.0, 60.0, 1800.0]
    assert isinstance(wishes[0], OpenLane)
    assert wishes[0].num_buckets == 64


def test_numbers_are_never_given_out_twice() -> None:
    desk = Desk()
    first = desk.attach()
    desk.feed(Left(b"r", first))
    second = desk.attach()
    desk.feed(ProcessGone(second))
    assert (first, second, desk.attach()) == (1, 2, 3)


def test_when_the_numbers_are_used_up_it_says_so() -> None:
    desk = Desk()
    desk.table._next_id = FRONTENDS_END - 1  # 65,534 have come and gone
    assert desk.attach() == FRONTENDS_END - 1
    refusal = desk.knock(desk.nonce())
    assert isinstance(refusal, Refused)
    assert refusal.error.kind == OverloadedError.__name__
    assert "65535" in refusal.error.message


# --- who is not let in -------------------------------------------------------------


def test_a_request_serves_once() -> None:
    """Guards: a recorded request that opens a second lane."""
    desk = Desk()
    nonce = desk.nonce()
    asked = Asked(b"r", "k1", desk.request(nonce, desk.knock(nonce).cookie))
    assert len(desk.feed(asked)) == 1
    assert desk.feed(asked) == []
    assert (desk.table.num_replayed, len(desk.table)) == (1, 1)


def test_a_cookie_is_for_one_caller_one_nonce_one_key_and_a_while() -> None:
    desk = Desk()
    nonce = desk.nonce()
    cookie = desk.knock(nonce).cookie
    request = desk.request(nonce, cookie)
    for strange in (
        Asked(b"other", "k1", request),
        Asked(b"r", "k0", request),
        Asked(b"r", "k1", desk.request(b"n" * 16, cookie)),
        Asked(b"r", "k1", desk.request(nonce, cookie[:-1] + bytes([cookie[-1] ^ 1]))),
        Asked(b"r", "k1", desk.request(nonce, b"\xff" + cookie[1:])),
        Asked(b"r", "k1", desk.request(nonce, b"")),
    ):
        assert desk.feed(strange) == []
    assert desk.table.num_forged == 6
    assert desk.feed(Asked(b"r", "k1", request), 10.1) == []
    assert desk.table.num_stale == 1
    assert desk.feed(Asked(b"r", "k1", request), 9.9) != []


def test_recorded_knocks_cost_nothing() -> None:
    """Guards: a table of challenges that strangers fill."""
    desk = Desk()
    nonce = desk.nonce()
    cookies = {desk.knock(nonce).cookie for _ in range(1000)}
    assert len(cookies) == 1000
    assert (len(desk.table), len(desk.table._used)) == (0, 0)


def test_used_cookies_are_forgotten_when_they_are_stale_and_never_pile_up() -> None:
    desk = Desk(used_cookies_max=3)
    for _ in range(3):
        desk.attach()
    assert isinstance(desk.knock(desk.nonce()), Wait)
    (wish,) = desk.ask(now_s=11.0)
    assert isinstance(wish, OpenLane)
    assert len(desk.table._used) == 1


def test_another_version_is_told() -> None:
    desk = Desk()
    (answer,) = desk.feed(Knocked(b"r", "k1", Knock(PROTOCOL + 1, b"n" * 16)))
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert answer.message.error.field == "protocol"


def test_while_the_engine_loads_callers_wait() -> None:
    desk = Desk(is_up=False)
    assert desk.knock(b"n") == Wait(b"n", "the engine is loading")
    desk.feed(WorldUp(LEADER, ""))
    assert isinstance(desk.knock(b"n"), Challenge)


def test_many_who_attach_wait_for_each_other_and_too_many_are_refused() -> None:
    desk = Desk(opening_max=2, frontends_max=3)
    wishes = [*desk.ask(), *desk.ask()]
    assert isinstance(desk.knock(b"n"), Wait)
    for wish in wishes:
        assert isinstance(wish, OpenLane)
        desk.feed(LaneOpen(wish.frontend_id, "q", "r"))
    desk.attach()
    refusal = desk.knock(b"n")
    assert isinstance(refusal, Refused)
    assert "3 frontends" in refusal.error.message


def test_a_lane_that_rank_0_refuses_is_told_and_forgotten() -> None:
    desk = Desk()
    desk.ask()
    (answer,) = desk.feed(LaneRefused(1, OverloadedError("no room").to_data()))
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert answer.message.error.message == "no room"
    assert len(desk.table) == 0


# --- leaving -----------------------------------------------------------------------


def test_a_goodbye_closes_the_lane_and_is_acked() -> None:
    desk = Desk()
    frontend_id = desk.attach()
    frontend = desk.table.frontend(frontend_id)
    assert frontend is not None
    assert desk.feed(Left(b"new route", frontend_id)) == [
        Unwatch(frontend_id),
        CloseLane(frontend_id, "its frontend has left"),
        Tell(b"new route", frontend_id, frontend.key, GoodbyeAck()),
    ]


def test_the_end_of_a_process_closes_its_lane() -> None:
    desk = Desk()
    frontend_id = desk.attach()
    effects = desk.feed(ProcessGone(frontend_id))
    why = "its frontend 'front' (process 20) has ended"
    assert effects == [Unwatch(frontend_id), CloseLane(frontend_id, why)]


def test_a_lane_that_rank_0_closed_is_only_forgotten() -> None:
    desk = Desk()
    frontend_id = desk.attach()
    assert desk.feed(LaneGone(frontend_id)) == [Unwatch(frontend_id)]


@pytest.mark.parametrize("news", [ProcessGone(7), LaneGone(7), LaneOpen(7, "q", "r")])
def test_late_news_is_counted(news: Event) -> None:
    desk = Desk()
    assert desk.feed(news) == []
    assert desk.table.num_unknown == 1


def test_the_worlds_end_is_told_to_all_once_and_for_ever() -> None:
    desk = Desk()
    first, second = desk.attach(b"a"), desk.attach(b"b")
    desk.ask(b"c")
    effects = desk.feed(WorldDown("killed"))
    told = [(e.route, e.message) for e in effects if isinstance(e, Tell)]
    assert told == [(b"a", WorldEnded("killed")), (b"b", WorldEnded("killed"))]
    assert [e.frontend_id for e in effects if isinstance(e, Unwatch)] == [first, second]
    (refusal,) = [e for e in effects if isinstance(e, Answer)]
    assert refusal.route == b"c"
    assert desk.feed(WorldDown("again")) == []
    late = desk.knock(b"n")
    assert isinstance(late, Refused)
    assert late.error.kind == EngineDeadError.__name__
    assert "killed" in late.error.message
