"""The last things that happened to one session, told when something impossible happens."""

from __future__ import annotations

from collections import deque

STORY_LENGTH_MAX = 32


class Story:
    """A bounded list of `state <- event` lines."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lines: deque[str] = deque(maxlen=STORY_LENGTH_MAX)

    def add(self, state: str, event: object) -> None:
        self._lines.append(f"{state} <- {event!r}"[:200])

    def __str__(self) -> str:
        return f"{self._title}: " + "; ".join(self._lines)
