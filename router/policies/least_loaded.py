"""The server with the fewest tokens in flight.

Tokens and not requests: a prompt of 8,000 tokens weighs what it costs. The
router's own reservations are exact, so the choice is greedy list scheduling,
at most twice as loaded as the best possible assignment. Ties go to fewer
requests, then to the earlier arrival number.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate


class LeastLoaded:
    def choose(self, candidates: Sequence[Candidate]) -> int:
        def weight(index: int) -> tuple[int, int, int]:
            one = candidates[index]
            return (one.tokens_in_flight, one.num_in_flight, one.arrival)

        return min(range(len(candidates)), key=weight)
