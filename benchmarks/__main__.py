"""`python -m benchmarks AREA [--quick] [--json FILE]`: run one area and print its figures.

The JSON is one flat object of the metric names that benchmarks/README.md
documents, each with a number.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

AREAS = {"executor": "benchmarks.executor", "smoke": "benchmarks.smoke"}

Area = Callable[[bool], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("area", choices=sorted(AREAS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics there")
    arguments = parser.parse_args()
    print(f"area {arguments.area}: {os.cpu_count()} cores, torch {version('torch')}")
    run: Area = importlib.import_module(AREAS[arguments.area]).run
    metrics = run(arguments.quick)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:,.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
