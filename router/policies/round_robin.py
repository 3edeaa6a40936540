"""One after the other.

Fair in requests whatever they cost, so right where requests are alike or
servers tell nothing. It remembers the last chosen arrival number and not a
position, so that a server that leaves or returns shifts nobody's turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate


class RoundRobin:
    def __init__(self) -> None:
        self._last_arrival = -1

    def choose(self, candidates: Sequence[Candidate]) -> int:
        index = next((i for i, one in enumerate(candidates) if one.arrival > self._last_arrival), 0)
        self._last_arrival = candidates[index].arrival
        return index
