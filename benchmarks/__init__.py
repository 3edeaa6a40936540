"""Figures, by one command: `scripts/bench AREA [--quick] [--json FILE]`."""
