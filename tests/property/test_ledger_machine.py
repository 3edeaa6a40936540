"""The ledger against a plain model, under any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor.ledger import TABLE, TERMINAL, Event, Ledger, Outcome, State
from protos.errors import DuplicateRequestError, InternalError

TOMBSTONES_MAX = 3
EVENTS = [event for event in Event if event is not Event.BURY]


class LedgerMachine(RuleBasedStateMachine):
    """The model: a dict of live states, a list of the dead in order of death, counts of ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(tombstones_max=TOMBSTONES_MAX)
        self.live: dict[int, tuple[str, State]] = {}
        self.dead: list[int] = []
        self.ends: Counter[int] = Counter()
        self.num_registered = 0

    @rule(name=st.sampled_from("abcdef"))
    def register(self, name: str) -> None:
        if any(name == live_name for live_name, _ in self.live.values()):
            with pytest.raises(DuplicateRequestError):
                self.ledger.register(name)
            return
        client_id = self.ledger.register(name)
        assert client_id not in self.live
        assert client_id not in self.dead
        self.live[client_id] = (name, State.REGISTERED)
        self.num_registered += 1

    @rule(pick=st.integers(0, 30), event=st.sampled_from(EVENTS))
    def apply(self, pick: int, event: Event) -> None:
        if pick in self.live:
            self._apply_live(pick, event)
        elif pick in self.dead[-TOMBSTONES_MAX:]:
            if event is Event.SEND:  # only our own mistake could send the dead
                with pytest.raises(InternalError):
                    self.ledger.apply(pick, event)
            else:
                assert self.ledger.apply(pick, event) is Outcome.LATE
        else:
            assert self.ledger.apply(pick, event) is Outcome.UNKNOWN

    def _apply_live(self, client_id: int, event: Event) -> None:
        name, state = self.live[client_id]
        target = TABLE.get((state, event))
        if target is None:
            with pytest.raises(InternalError, match=f"'{name}'"):
                self.ledger.apply(client_id, event)
            return
        assert self.ledger.apply(client_id, event) is Outcome.APPLIED
        if target in TERMINAL:
            del self.live[client_id]
            self.dead.append(client_id)
            self.ends[client_id] += 1
        else:
            self.live[client_id] = (name, target)

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check()
        assert list(self.ledger.live()) == list(self.live)
        expected = Counter(str(state) for _, state in self.live.values())
        assert +Counter(self.ledger.entries_by_state()) == expected
        for name, client_id in [(name, key) for key, (name, _) in self.live.items()]:
            assert self.ledger.find(name) == client_id

    @invariant()
    def every_admitted_request_has_at_most_one_answer(self) -> None:
        assert all(count == 1 for count in self.ends.values())
        counters = self.ledger.counters()
        assert sum(counters[str(state)] for state in TERMINAL) == len(self.ends)
        assert counters["registered"] == self.num_registered


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
