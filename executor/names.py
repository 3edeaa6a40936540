"""External ids of live requests across the lanes of one engine.

Within its lane the frontend keeps external ids unique; it may have given one up
and taken it again before the worker hears of it, so that the older request
still ends while the newer one bears the name. Here names are kept unique
between lanes, and found for whoever aborts a request that is not its own.
Pure.
"""

from __future__ import annotations

import re

from executor.ledger import frontend_of
from protos.errors import shorten

_HOLDER = re.compile(r"\bsequence:(\d+)\b")


class Names:
    def __init__(self) -> None:
        self._holders: dict[str, dict[int, None]] = {}
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._names)

    def take(self, external_id: str, client_id: int) -> bool:
        """False where a request of another lane bears the name."""
        holders = self._holders.get(external_id)
        if holders is not None and frontend_of(next(iter(holders))) != frontend_of(client_id):
            return False
        self._holders.setdefault(external_id, {})[client_id] = None
        self._names[client_id] = external_id
        return True

    def give_back(self, client_id: int) -> None:
        """When the request has ended; unknown ids are ignored."""
        external_id = self._names.pop(client_id, None)
        if external_id is None:
            return
        holders = self._holders[external_id]
        del holders[client_id]
        if not holders:
            del self._holders[external_id]

    def find(self, external_id: str) -> int | None:
        """The newest request of that name."""
        holders = self._holders.get(external_id)
        return None if holders is None else next(reversed(holders))

    def in_words(self, holders: str) -> str:
        """An engine's `sequence:NUMBER` as its caller knows the request."""

        def name(found: re.Match[str]) -> str:
            external_id = self._names.get(int(found[1]))
            return found[0] if external_id is None else f"request {shorten(external_id, 40)!r}"

        return _HOLDER.sub(name, holders)

    def check(self) -> None:
        """Raises AssertionError where the two tables disagree."""
        held = {client_id: name for name, holders in self._holders.items() for client_id in holders}
        assert held == self._names
        assert all(self._holders.values())
