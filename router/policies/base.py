"""The seam that every policy fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that could take a request, as a policy sees it.

    `arrival` is the server's place in the configuration: unique, and the tie-breaker.
    """

    arrival: int
    tokens_in_flight: int
    num_in_flight: int


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate]) -> int:
        """The index of the chosen candidate.

        `candidates` is never empty and sorted by arrival. The same history of
        calls gives the same choices.
        """
        ...
