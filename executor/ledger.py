"""The ledger: every live `client_id` at an executor boundary, and its state.

Pure and role-blind: the proxy and the worker each keep one, and one table says
what may follow what. A request's life:

    REGISTERED -> SENT -> RUNNING -> STREAMING -> FINISHED | CANCELLED | FAILED -> TOMBSTONE
    and from SENT, RUNNING, STREAMING a cancel leads to CANCELLING, which ends
    by whatever comes first: the confirmation, an end or a failure.

An entry that ends is buried at once: its external id is free again, and a
bounded window of tombstones tells what comes late from what was never known.
An event that the table does not list for a state is our own mistake and raises
with that entry's story.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from protos.errors import DuplicateRequestError, InternalError

FRONTEND_BITS = 16
COUNTER_BITS = 48
STORY_EVENTS_MAX = 16


class State(enum.StrEnum):
    REGISTERED = "registered"
    SENT = "sent"
    RUNNING = "running"
    STREAMING = "streaming"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TOMBSTONE = "tombstone"


class Event(enum.StrEnum):
    SEND = "send"
    ACCEPT = "accept"
    TOKENS = "tokens"
    CANCEL = "cancel"
    FINISH = "finish"
    CONFIRM = "confirm"
    """The other side says that a cancel has taken effect."""
    FAIL = "fail"
    BURY = "bury"


class Outcome(enum.StrEnum):
    APPLIED = "applied"
    LATE = "late"
    """The request had ended: drop what came."""
    UNKNOWN = "unknown"


LIVE = (State.REGISTERED, State.SENT, State.RUNNING, State.STREAMING, State.CANCELLING)
TERMINAL = (State.FINISHED, State.CANCELLED, State.FAILED)
_ENDING = {
    Event.FINISH: State.FINISHED,
    Event.CONFIRM: State.CANCELLED,
    Event.FAIL: State.FAILED,
}


def _row(state: State, **events: State) -> dict[tuple[State, Event], State]:
    return {(state, Event(name)): target for name, target in events.items()}


def _ends(state: State) -> dict[tuple[State, Event], State]:
    return {(state, event): target for event, target in _ENDING.items()}


TABLE: dict[tuple[State, Event], State] = {
    **_row(State.REGISTERED, send=State.SENT, cancel=State.CANCELLED, fail=State.FAILED),
    **_row(State.SENT, accept=State.RUNNING, tokens=State.STREAMING, cancel=State.CANCELLING),
    **_ends(State.SENT),
    **_row(State.RUNNING, tokens=State.STREAMING, cancel=State.CANCELLING),
    **_ends(State.RUNNING),
    **_row(State.STREAMING, tokens=State.STREAMING, cancel=State.CANCELLING),
    **_ends(State.STREAMING),
    **_row(
        State.CANCELLING,
        accept=State.CANCELLING,
        tokens=State.CANCELLING,
        cancel=State.CANCELLING,
    ),
    **_ends(State.CANCELLING),
    **{(state, Event.BURY): State.TOMBSTONE for state in TERMINAL},
    **_row(
        State.TOMBSTONE,
        accept=State.TOMBSTONE,
        tokens=State.TOMBSTONE,
        cancel=State.TOMBSTONE,
        finish=State.TOMBSTONE,
        confirm=State.TOMBSTONE,
        fail=State.TOMBSTONE,
    ),
}


@dataclass(slots=True)
class Entry:
    client_id: int
    external_id: str
    state: State = State.REGISTERED
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS_MAX))

    def move(self, event: Event) -> None:
        """Follow the table. Raises InternalError, with the story, where it has no such pair."""
        target = TABLE.get((self.state, event))
        if target is None:
            raise InternalError(
                f"request {self.client_id:#x} ({self.external_id!r}) got {event} in state "
                f"{self.state}; its story: {' '.join(self.story) or 'just registered'}"
            )
        if target is not self.state:  # repeated tokens would push the start of the story out
            self.story.append(f"{event}->{target}")
        self.state = target


class Ledger:
    """See the module's docstring. `frontend_id` fills the high bits of minted client ids."""

    def __init__(
        self,
        *,
        frontend_id: int = 0,
        tombstones_max: int = 4096,
        counter_max: int = (1 << COUNTER_BITS) - 1,
    ) -> None:
        assert 0 <= frontend_id < 1 << FRONTEND_BITS
        assert 0 < counter_max < 1 << COUNTER_BITS
        self._frontend = frontend_id << COUNTER_BITS
        self._counter = 0
        self._counter_max = counter_max
        self._tombstones_max = tombstones_max
        self._entries: dict[int, Entry] = {}
        self._external: dict[str, int] = {}
        self._tombstones: OrderedDict[int, Entry | None] = OrderedDict()
        self._ended = dict.fromkeys(TERMINAL, 0)
        self._registered = 0
        self.num_late = 0
        self.num_unknown = 0
        self.num_duplicate = 0

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, external_id: str) -> int:
        """A fresh client id. Raises DuplicateRequestError where `external_id` is live."""
        if external_id in self._external:
            raise DuplicateRequestError(
                f"a request with external_id {external_id!r} is already running here",
                field="external_id",
                value=external_id,
                limit="unique among the requests that are running",
            )
        if self._counter >= self._counter_max:
            raise InternalError(
                f"the counter of client ids is full at {self._counter_max}; restart this server",
                field="client_id",
                limit=self._counter_max,
            )
        self._counter += 1
        client_id = self._frontend | self._counter
        self._add(client_id, external_id)
        return client_id

    def adopt(self, client_id: int) -> bool:
        """Register an id that the other side minted. False, and counted, where it is not new.

        External ids are the minting side's business: it may have given one up, and
        taken it again, before this side heard of it.
        """
        if client_id in self._entries or client_id in self._tombstones:
            self.num_duplicate += 1
            return False
        self._add(client_id, f"client:{client_id:#x}")
        return True

    def refuse(self, client_id: int) -> None:
        """Leave a tombstone for a request that has not come yet, so that it never runs."""
        assert client_id not in self._entries
        self._bury(client_id, None)

    def was_refused(self, client_id: int) -> bool:
        """Whether `refuse` came before the request."""
        return client_id in self._tombstones and self._tombstones[client_id] is None

    def apply(self, client_id: int, event: Event) -> Outcome:
        """Move an entry; late and unknown events are counted and change nothing."""
        entry = self._entries.get(client_id)
        if entry is None:
            return self._apply_to_the_dead(client_id, event)
        entry.move(event)
        if entry.state in self._ended:
            self._end(entry)
        return Outcome.APPLIED

    def state(self, client_id: int) -> State | None:
        """None: unknown, or forgotten after the window of tombstones."""
        entry = self._entries.get(client_id)
        if entry is not None:
            return entry.state
        return State.TOMBSTONE if client_id in self._tombstones else None

    def find(self, external_id: str) -> int | None:
        """The live client id of an external id."""
        return self._external.get(external_id)

    def live(self) -> tuple[int, ...]:
        """Live client ids in the order in which they were registered."""
        return tuple(self._entries)

    def entries_by_state(self) -> dict[str, int]:
        counts = {str(state): 0 for state in LIVE}
        for entry in self._entries.values():
            counts[entry.state] += 1
        return counts

    def counters(self) -> dict[str, int]:
        return {
            "registered": self._registered,
            **{str(state): count for state, count in self._ended.items()},
            "tombstones": len(self._tombstones),
            "late": self.num_late,
            "unknown": self.num_unknown,
            "duplicate": self.num_duplicate,
        }

    def check(self) -> None:
        """Raises AssertionError where the books do not balance."""
        assert self._registered == len(self._entries) + sum(self._ended.values())
        assert len(self._tombstones) <= self._tombstones_max
        assert len(self._external) == len(self._entries)
        for client_id, entry in self._entries.items():
            assert entry.client_id == client_id
            assert entry.state in LIVE, f"{entry.external_id!r} is {entry.state} but not buried"
            assert self._external[entry.external_id] == client_id
            assert client_id not in self._tombstones

    def _add(self, client_id: int, external_id: str) -> None:
        self._entries[client_id] = Entry(client_id, external_id)
        self._external[external_id] = client_id
        self._registered += 1

    def _apply_to_the_dead(self, client_id: int, event: Event) -> Outcome:
        if client_id not in self._tombstones:
            self.num_unknown += 1
            return Outcome.UNKNOWN
        entry = self._tombstones[client_id]
        if entry is not None:
            entry.move(event)
        if event in _ENDING:
            self.num_duplicate += 1
        else:
            self.num_late += 1
        return Outcome.LATE

    def _end(self, entry: Entry) -> None:
        self._ended[entry.state] += 1
        del self._entries[entry.client_id]
        del self._external[entry.external_id]
        entry.move(Event.BURY)
        self._bury(entry.client_id, entry)

    def _bury(self, client_id: int, entry: Entry | None) -> None:
        self._tombstones[client_id] = entry
        if len(self._tombstones) > self._tombstones_max:
            self._tombstones.popitem(last=False)
