"""When a frontend that died is started again: soon at first, then ever later. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.2
DELAY_S_MAX = 30.0
GOOD_LIFE_S = 60.0
"""Whoever lived so long died of something new."""


@dataclass(slots=True)
class Restarts:
    """Of one seat."""

    num_in_a_row: int = 0

    def delay_s(self, lived_s: float) -> float:
        """Asked at each death."""
        if lived_s >= GOOD_LIFE_S:
            self.num_in_a_row = 0
        delay_s = min(FIRST_DELAY_S * 2.0**self.num_in_a_row, DELAY_S_MAX)
        self.num_in_a_row = min(self.num_in_a_row + 1, 16)
        return delay_s
