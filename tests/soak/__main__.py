"""`python -m tests.soak AREA`: an area under random faults for as long as is wanted.

The seed is printed first. A round depends on its form and its own seed alone, so a violation
is tried again with `--seed` and `--form` as it was printed with, in the first round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
import sys
from pathlib import Path
from typing import Any

AREAS = {"executor": "tests.soak.soak_executor"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("area", choices=sorted(AREAS))
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="every form has a round at least"
    )
    parser.add_argument("--seed", type=int, help="a random one where none is given")
    parser.add_argument("--form", action="append", help="of the executor; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="the same for people")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    area: Any = importlib.import_module(AREAS[arguments.area])
    report = area.run(arguments.minutes, seed, arguments.form)
    print("\n".join(report.lines()))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.figures(), indent=2) + "\n")
    if arguments.summary:
        arguments.summary.write_text(report.page())
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
