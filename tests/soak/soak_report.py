"""What a soak has seen, by form: as lines, as figures, and as a page for docs/."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak.soak_round import Round

COLUMNS = (
    "form | rounds | requests | turned away | deeds | answers | worst s from death to answer "
    "| violations"
)

TERMS = (
    "The forms are those of [engines.md](engines.md), with numbers: `post2` has two postprocess "
    "workers, `spawn2` and `mpi2` two ranks by that launcher, `attach3` three frontends on one "
    "engine, `rpc` one server on a worker. A *deed* is what was done to a process: `rank` runs the "
    "engine, `post` is a postprocess worker, `front` a frontend, `owner` the process that started "
    "the ranks, `helper` what stands between (mpiexec, Ray's driver and actors), `loop` the engine "
    "from within (crash: it raises; exit: its process is gone). `kill` and `term` are the signals, "
    "`pause` is a stop that ends in time, `stop` one that does not. *Turned away* was refused at "
    "once, before anything ran."
)


@dataclass
class Tally:
    rounds: int = 0
    requests: int = 0
    refused: int = 0
    worst_s: float = 0.0
    violations: int = 0
    deeds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, told: Round) -> None:
        self.rounds += 1
        self.requests += told.num_requests
        self.refused += told.refused.total()
        self.worst_s = max(self.worst_s, told.worst_s)
        self.violations += bool(told.violation)
        self.deeds += Counter(deed.name for deed in told.deeds)
        self.ends += told.ends

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.rounds),
            f"{self.requests:,}",
            f"{self.refused:,}",
            _counts(self.deeds),
            _counts(self.ends),
            f"{self.worst_s:.2f}" if self.worst_s else "no death",
            str(self.violations),
        )


@dataclass
class Report:
    seed: int
    minutes: float
    command: str
    forms: dict[str, Tally] = field(default_factory=dict)
    machines: Counter[str] = field(default_factory=Counter)
    """Rounds of each."""
    examples: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    began: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

    def add(self, told: Round) -> None:
        self.forms.setdefault(told.form, Tally()).add(told)
        if told.violation:
            self.violations.append(told.violation)

    def lines(self) -> list[str]:
        names = COLUMNS.replace("\n", " ").split(" | ")[1:]
        lines = [
            f"{form}: " + "; ".join(f"{n}: {c}" for n, c in zip(names, tally.cells(), strict=True))
            for form, tally in self.forms.items()
        ]
        lines.append(f"property machines, examples: {_counts(self.examples)}")
        return [*lines, f"violations: {len(self.violations)}"]

    def figures(self) -> dict[str, Any]:
        forms = {
            form: {**vars(tally), "deeds": dict(tally.deeds), "ends": dict(tally.ends)}
            for form, tally in self.forms.items()
        }
        return {**vars(self), "forms": forms, "machines": dict(self.machines)}

    def page(self) -> str:
        head = " | ".join(COLUMNS.split(" | "))
        rows = [f"| {form} | {' | '.join(t.cells())} |" for form, t in self.forms.items()]
        lines = [
            "# The last soak",
            "`scripts/soak executor` runs every form of the executor under load while processes of "
            "it are killed, stopped and continued at random, and its property machines on seeds "
            "that no test has. What it judges is in `tests/soak/soak_round.py`. This page is the "
            "summary of one run, as it came out.",
            "",
            f"- command: `{self.command}`",
            f"- began {self.began}, {self.minutes:.1f} minutes, seed {self.seed}",
            f"- machine: {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
            f"Python {platform.python_version()}",
            f"- property machines, examples: {_counts(self.examples)}",
            f"- violations: {len(self.violations)}",
            "",
            TERMS,
            "",
            f"| {head} |",
            "|" + " --- |" * len(COLUMNS.split(" | ")),
            *rows,
        ]
        for violation in self.violations:
            lines += ["", "```", violation, "```"]
        return "\n".join(lines) + "\n"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"
