"""One line of the doctor's report."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.what}"
        return f"{line}\n{'':<8} -> {self.remedy}" if self.remedy else line


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def warning(what: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, what, remedy)


def problem(what: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, what, remedy)
