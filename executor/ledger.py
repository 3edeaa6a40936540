"""The ledger: every live `client_id` at an executor boundary, and its state.

Pure and role-blind: the proxy and the worker each keep one, and one table says
what may follow what. A request's life:

    REGISTERED -> SENT -> RUNNING -> STREAMING -> FINISHED | CANCELLED | FAILED -> TOMBSTONE
    and from SENT, RUNNING, STREAMING a cancel leads to CANCELLING, which ends
    by whatever comes first: the confirmation, an end or a failure.

An entry that ends is buried at once: its external id is free again, and a
bounded window of tombstones tells what comes late from what was never known.
An event that the table does not list for a state is our own mistake and raises
with that entry's story. `docs/ledger.md` is drawn from the table.

A client id names its lane: the high bits are the id of the frontend that minted
it. The minting side keeps one counter and never wraps it; whoever gives out
frontend ids never gives one twice in a world's life. So no client id comes
twice, and a late answer cannot reach a younger request.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from protos.errors import DuplicateRequestError, InternalError

FRONTEND_BITS = 16
COUNTER_BITS = 48


def frontend_of(client_id: int) -> int:
    """The lane to which a client id belongs."""
    return client_id >> COUNTER_BITS


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


class Adoption(enum.StrEnum):
    """What `adopt` makes of an id that the other side minted."""

    NEW = "new"
    REFUSED = "refused"
    """Its cancel came before it did: it must never run, and is answered as cancelled."""
    DUPLICATE = "duplicate"
    """It has been here: whoever sent it first has the answer, or will."""


_ACCEPT, _APPLIED = Event.ACCEPT, Outcome.APPLIED
"""Asked once per token: looking an enum's member up is slow before Python 3.12."""
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
    **_row(State.RUNNING, accept=State.RUNNING, tokens=State.STREAMING, cancel=State.CANCELLING),
    **_ends(State.RUNNING),
    **_row(
        State.STREAMING, accept=State.STREAMING, tokens=State.STREAMING, cancel=State.CANCELLING
    ),
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
    """`external_id` is empty where the other side minted the id."""

    client_id: int
    external_id: str
    state: State = State.REGISTERED
    events: list[Event] = field(default_factory=list)
    """Those that changed its state. The table has no way round, so they are few."""

    def move(self, event: Event) -> None:
        """Follow the table. Raises InternalError, with the story, where it has no such pair."""
        target = TABLE.get((self.state, event))
        if target is None:
            raise InternalError(
                f"request {self.client_id:#x} ({self.external_id!r}) got {event} in state "
                f"{self.state}; its story: {self.story or 'just registered'}"
            )
        if target is not self.state:
            self.events.append(event)
            self.state = target

    @property
    def story(self) -> str:
        """`send->sent tokens->streaming` and so on."""
        return " ".join(f"{event}->{state}" for event, state in self._steps())

    @property
    def end(self) -> State | None:
        """None while it lives."""
        return next((state for _, state in self._steps() if state in TERMINAL), None)

    def _steps(self) -> Iterator[tuple[Event, State]]:
        state = State.REGISTERED
        for event in self.events:
            state = TABLE[state, event]
            yield event, state


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
        self._lanes: dict[int, dict[int, Entry]] = {}
        """The same entries by frontend id; a lane without any is not there."""
        self._external: dict[str, int] = {}
        self._tombstones: OrderedDict[int, Entry | None] = OrderedDict()
        self._ended = dict.fromkeys(TERMINAL, 0)
        self._registered = 0
        self.num_late = 0
        self.num_unknown = 0
        self.num_duplicate = 0
        self.num_foreign = 0

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, external_id: str) -> int:
        """A fresh client id. Raises DuplicateRequestError where `external_id` is live."""
        assert external_id
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

    def adopt(self, client_id: int) -> Adoption:
        """Register an id that the other side minted, unless it is refused or not new.

        External ids are the minting side's business: it may have given one up, and
        taken it again, before this side heard of it.
        """
        if client_id in self._entries or self._tombstones.get(client_id) is not None:
            self.num_duplicate += 1
            return Adoption.DUPLICATE
        was_refused = client_id in self._tombstones
        if was_refused:
            del self._tombstones[client_id]
        self._add(client_id, "")
        if was_refused:  # from now on a dead one like others: a second copy is a duplicate
            self.apply(client_id, Event.CANCEL)
            return Adoption.REFUSED
        return Adoption.NEW

    def refuse(self, client_id: int) -> None:
        """Leave a tombstone for a request that has not come yet, so that it never runs."""
        assert client_id not in self._entries
        if client_id not in self._tombstones:
            self._bury(client_id, None)

    def is_of_lane(self, client_id: int, frontend_id: int) -> bool:
        """False, and counted, where the id is another lane's: it must have no effect there."""
        if frontend_of(client_id) == frontend_id:
            return True
        self.num_foreign += 1
        return False

    def apply(self, client_id: int, event: Event) -> Outcome:
        """Move an entry; late and unknown events are counted and change nothing."""
        entry = self._entries.get(client_id)
        if entry is None:
            return self._apply_to_the_dead(client_id, event)
        if TABLE.get((entry.state, event)) is entry.state:  # mostly one more step of a stream
            if event is _ACCEPT and entry.state is not State.CANCELLING:
                self.num_duplicate += 1
            return _APPLIED
        entry.move(event)
        if entry.state in self._ended:
            self._end(entry)
        return _APPLIED

    def state(self, client_id: int) -> State | None:
        """None: unknown, or forgotten after the window of tombstones."""
        entry = self._entries.get(client_id)
        if entry is not None:
            return entry.state
        return State.TOMBSTONE if client_id in self._tombstones else None

    def end_of(self, client_id: int) -> State | None:
        """How a request ended that is remembered; None where it lives, was refused before it
        came, or is unknown. Tells a second copy of an end from one that crossed with ours."""
        dead = self._tombstones.get(client_id)
        return None if dead is None else dead.end

    def find(self, external_id: str) -> int | None:
        """The live client id of an external id."""
        return self._external.get(external_id)

    def live(self) -> tuple[int, ...]:
        """Live client ids in the order in which they were registered."""
        return tuple(self._entries)

    def live_of(self, frontend_id: int) -> tuple[int, ...]:
        """Those of one lane, in the same order; costs nothing for the other lanes' entries."""
        return tuple(self._lanes.get(frontend_id, ()))

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
            "foreign": self.num_foreign,
        }

    def check(self) -> None:
        """Raises AssertionError where the books do not balance."""
        assert self._registered == len(self._entries) + sum(self._ended.values())
        assert len(self._tombstones) <= self._tombstones_max
        assert len(self._external) == sum(bool(e.external_id) for e in self._entries.values())
        assert sum(map(len, self._lanes.values())) == len(self._entries)
        assert all(self._lanes.values()), "an empty lane was kept"
        for client_id, entry in self._entries.items():
            assert entry.client_id == client_id
            assert entry.state in LIVE, f"{entry.external_id!r} is {entry.state} but not buried"
            assert not entry.external_id or self._external[entry.external_id] == client_id
            assert self._lanes[frontend_of(client_id)][client_id] is entry
            assert client_id not in self._tombstones
        for dead in self._tombstones.values():
            assert dead is None or dead.state is State.TOMBSTONE, f"{dead} is no tombstone"

    def _add(self, client_id: int, external_id: str) -> None:
        entry = Entry(client_id, external_id)
        self._entries[client_id] = entry
        self._lanes.setdefault(frontend_of(client_id), {})[client_id] = entry
        if external_id:
            self._external[external_id] = client_id
        self._registered += 1

    def _apply_to_the_dead(self, client_id: int, event: Event) -> Outcome:
        if client_id not in self._tombstones:
            self.num_unknown += 1
            return Outcome.UNKNOWN
        entry = self._tombstones[client_id] or Entry(client_id, "", State.TOMBSTONE)
        entry.move(event)
        if event in _ENDING:
            self.num_duplicate += 1
        else:
            self.num_late += 1
        return Outcome.LATE

    def _end(self, entry: Entry) -> None:
        self._ended[entry.state] += 1
        del self._entries[entry.client_id]
        lane = self._lanes[frontend_of(entry.client_id)]
        del lane[entry.client_id]
        if not lane:
            del self._lanes[frontend_of(entry.client_id)]
        if entry.external_id:
            del self._external[entry.external_id]
        entry.move(Event.BURY)
        self._bury(entry.client_id, entry)

    def _bury(self, client_id: int, entry: Entry | None) -> None:
        self._tombstones[client_id] = entry
        if len(self._tombstones) > self._tombstones_max:
            self._tombstones.popitem(last=False)
