"""The ledger against a plain model, under any order of events.

The model shares nothing with the ledger's table: it knows a request's life as a
few sentences in code, its live ones as a dict and its dead ones as a list.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor.ledger import Adoption, Event, Ledger, Outcome
from protos.errors import DuplicateRequestError, InternalError

TOMBSTONES_MAX = 3
COUNTER_MAX = 12
MINE = 1
LANES = (MINE, 2, 3)
ENDINGS = {"finish": "finished", "confirm": "cancelled", "fail": "failed"}


def after(state: str, event: str) -> str | None:
    """The state that follows in the life of a live request; None where it is impossible."""
    if state == "registered":  # it has not left yet: nobody else can have spoken of it
        return {"send": "sent", "cancel": "cancelled", "fail": "failed"}.get(event)
    if event in ENDINGS:
        return ENDINGS[event]
    if event == "cancel":
        return "cancelling"
    if event == "accept":  # said once, before the first tokens; a repetition changes nothing
        return "running" if state == "sent" else state
    if event == "tokens":
        return "cancelling" if state == "cancelling" else "streaming"
    return None


class LedgerMachine(RuleBasedStateMachine):
    """`dead` holds (id, whether it was refused before it came) in order of death."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(
            frontend_id=MINE, tombstones_max=TOMBSTONES_MAX, counter_max=COUNTER_MAX
        )
        self.live: dict[int, tuple[str, str]] = {}
        self.dead: list[tuple[int, bool]] = []
        self.ends: Counter[str] = Counter()
        self.ended_as: dict[int, str] = {}
        self.num_registered = 0
        self.told = Counter(late=0, unknown=0, duplicate=0)

    @property
    def window(self) -> dict[int, bool]:
        return dict(self.dead[-TOMBSTONES_MAX:])

    @rule(name=st.sampled_from("abcdef"))
    def register(self, name: str) -> None:
        if any(name == live_name for live_name, _ in self.live.values()):
            with pytest.raises(DuplicateRequestError):
                self.ledger.register(name)
            return
        num_minted = self.ledger._counter
        if num_minted == COUNTER_MAX:
            with pytest.raises(InternalError, match="restart") as full:
                self.ledger.register(name)
            assert full.value.field == "client_id"
            return
        client_id = self.ledger.register(name)
        assert client_id == (MINE << 48) + num_minted + 1
        self._begin(client_id, name)

    @rule(lane=st.sampled_from(LANES[1:]), number=st.integers(1, 6))
    def adopt(self, lane: int, number: int) -> None:
        client_id = (lane << 48) + number
        refused = self.window.get(client_id)
        adoption = self.ledger.adopt(client_id)
        if client_id in self.live or refused is False:
            assert adoption is Adoption.DUPLICATE
            self.told["duplicate"] += 1
        elif refused:
            assert adoption is Adoption.REFUSED
            self._forget_refusal(client_id)
            self.num_registered += 1
            self._end(client_id, "cancelled")
        else:
            assert adoption is Adoption.NEW
            self._begin(client_id, "")

    @rule(lane=st.sampled_from(LANES), number=st.integers(1, 14))
    def refuse(self, lane: int, number: int) -> None:
        """As the worker does: a cancel of something that is not there yet."""
        client_id = (lane << 48) + number
        if client_id not in self.live and lane != MINE:
            self.ledger.refuse(client_id)
            if client_id not in self.window:
                self.dead.append((client_id, True))

    @rule(
        lane=st.sampled_from(LANES),
        number=st.integers(1, 14),
        event=st.sampled_from([event for event in Event if event is not Event.BURY]),
    )
    def apply(self, lane: int, number: int, event: Event) -> None:
        client_id = (lane << 48) + number
        if client_id in self.live:
            self._apply_live(client_id, event)
        elif client_id not in self.window:
            assert self.ledger.apply(client_id, event) is Outcome.UNKNOWN
            self.told["unknown"] += 1
        elif event is Event.SEND:  # only our own mistake could send the dead
            with pytest.raises(InternalError):
                self.ledger.apply(client_id, event)
        else:
            assert self.ledger.apply(client_id, event) is Outcome.LATE
            self.told["duplicate" if event.value in ENDINGS else "late"] += 1

    def _apply_live(self, client_id: int, event: Event) -> None:
        name, state = self.live[client_id]
        target = after(state, event.value)
        if target is None:
            with pytest.raises(InternalError, match=f"'{name}'.*got {event} in state {state}"):
                self.ledger.apply(client_id, event)
            return
        assert self.ledger.apply(client_id, event) is Outcome.APPLIED
        if event is Event.ACCEPT and state in ("running", "streaming"):
            self.told["duplicate"] += 1
        if target in ENDINGS.values():
            del self.live[client_id]
            self._end(client_id, target)
        else:
            self.live[client_id] = (name, target)

    def _forget_refusal(self, client_id: int) -> None:
        """The last one: an older one may have left the window and stays where it was."""
        at = max(i for i, dead in enumerate(self.dead) if dead == (client_id, True))
        del self.dead[at]

    def _begin(self, client_id: int, name: str) -> None:
        assert client_id not in self.live
        self.live[client_id] = (name, "registered")
        self.num_registered += 1

    def _end(self, client_id: int, how: str) -> None:
        self.dead.append((client_id, False))
        self.ends[how] += 1
        self.ended_as[client_id] = how

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check()
        assert list(self.ledger.live()) == list(self.live)
        for lane in LANES:
            assert list(self.ledger.live_of(lane)) == [i for i in self.live if i >> 48 == lane]
        expected = Counter(state for _, state in self.live.values())
        assert +Counter(self.ledger.entries_by_state()) == expected
        for client_id, (name, state) in self.live.items():
            assert self.ledger.state(client_id) == state
            assert not name or self.ledger.find(name) == client_id
            assert self.ledger.end_of(client_id) is None
        for client_id, was_refused in self.window.items():
            assert self.ledger.state(client_id) == "tombstone"
            how = None if was_refused else self.ended_as[client_id]
            assert self.ledger.end_of(client_id) == how

    @invariant()
    def counts_agree(self) -> None:
        counters = self.ledger.counters()
        assert counters["registered"] == self.num_registered
        for how in ENDINGS.values():
            assert counters[how] == self.ends[how]
        assert {name: counters[name] for name in self.told} == dict(self.told)
        assert counters["tombstones"] <= TOMBSTONES_MAX


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
