"""Makes the pages of docs/ that are drawn from code; with --check, tells whether one is stale.

A page made here is never edited by hand: `scripts/docs` writes it, `scripts/check` and a
test compare it with what the code says today.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.config_page import config_page
from executor.ledger import LIVE, TABLE, Event, State

FOLDER = Path(__file__).resolve().parent

STATES: dict[State, str] = {
    State.REGISTERED: "It has a client id and a place for its answer, and has not left yet.",
    State.SENT: "It is on its way to the other side, which has said nothing about it.",
    State.RUNNING: "The other side has accepted it; no token has come.",
    State.STREAMING: "Tokens have come, and more may.",
    State.CANCELLING: "We asked for its end. Until the other side answers, it may still end well.",
    State.FINISHED: "Its answer is complete.",
    State.CANCELLED: "The cancel came first: the answer is that it was cancelled.",
    State.FAILED: "The answer is an error: a refusal, a deadline, a dead engine.",
    State.TOMBSTONE: (
        "It is over and its external id is free again. Only its client id is remembered, for as "
        "long as it is among the last to end, so that what comes late is not taken for unknown."
    ),
}
EVENTS: dict[Event, str] = {
    Event.SEND: "We passed it on to the other side.",
    Event.ACCEPT: "The other side has taken it in.",
    Event.TOKENS: "A step's tokens have come, and they are not the last.",
    Event.CANCEL: "Somebody wants it to end: the client, a stop string, a closing lane.",
    Event.FINISH: "The last tokens have come, with the reason and the usage.",
    Event.CONFIRM: "The other side says that a cancel has taken effect.",
    Event.FAIL: "It ends by an error, from either side.",
    Event.BURY: "The ledger's own: an entry that has ended becomes a tombstone at once.",
}

LEDGER_PAGE = """# The ledger
<!-- Made by `scripts/docs` from the table in `executor/ledger.py`. Do not edit. -->
A *boundary* is where one process hands a request to another and waits for its answer. On each
side of it a ledger lists every request that is live there, by its client id, with its state.
The proxy (the server's side) and the worker (the engine's side) each keep one, of the same kind:
the ledger does not know on which side it stands. Its promise is **one answer**: what is
registered ends exactly once, as finished, cancelled or failed.

What may follow what is one table. An event that it does not list for a state is our own mistake,
and raises an `InternalError` that tells how the entry came to where it is.

```mermaid
stateDiagram-v2
{diagram}
```

## States
| state | meaning | what may come, and where it leads |
| --- | --- | --- |
{states}

## Events
| event | meaning |
| --- | --- |
{events}

## What is not in the table
- **Late, duplicate, unknown.** An event for a tombstone changes nothing and is counted: an end
  (finish, confirm, fail) as *duplicate*, as a second accept is, and anything else as *late*. An
  event for an id that was never here, or that ended so long ago that its tombstone is forgotten,
  is *unknown*. The window of tombstones is bounded (`tombstones_max`).
- **A cancel before its request.** The worker cannot cancel what it has not got, so it leaves a
  tombstone that refuses: when the request comes it is registered and cancelled in one go, and
  answered once. A second copy of it is a duplicate and gets no answer.
- **Lanes.** The high bits of a client id are the id of the frontend that minted it. One worker
  serves many frontends; `live_of` lists the requests of one without looking at the others', and
  an id that comes over another frontend's lane is counted as *foreign* and has no effect.
- **The counter of client ids** never wraps: when it is full, registering is an error. Frontend
  ids are never given twice in a world's life. So no client id ever comes twice.
"""


def ledger_page() -> str:
    return LEDGER_PAGE.format(
        diagram="\n".join(f"    {line}" for line in _diagram()),
        states="\n".join(f"| {state} | {STATES[state]} | {_ways(state)} |" for state in State),
        events="\n".join(f"| {event} | {EVENTS[event]} |" for event in Event),
    )


def _diagram() -> list[str]:
    """One arrow for each pair of states, with all events that lead that way."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, event), target in TABLE.items():
        arrows.setdefault((state, target), []).append(event)
    lines = [f"[*] --> {LIVE[0]}"]
    lines += [f"{a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return [*lines, f"{State.TOMBSTONE} --> [*]"]


def _ways(state: State) -> str:
    ways: dict[State, list[str]] = {}
    for (start, event), target in TABLE.items():
        if start is state:
            ways.setdefault(target, []).append(event)
    return "; ".join(f"{', '.join(events)} → {target}" for target, events in ways.items())


PAGES = {"ledger.md": ledger_page, "configuration.md": config_page}


def main() -> int:
    is_check = sys.argv[1:] == ["--check"]
    stale = [name for name, make in PAGES.items() if _text(name) != make()]
    for name in stale:
        if is_check:
            sys.stderr.write(f"docs/{name} is stale: run scripts/docs and commit\n")
        else:
            (FOLDER / name).write_text(PAGES[name]())
    return 1 if is_check and stale else 0


def _text(name: str) -> str:
    path = FOLDER / name
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
