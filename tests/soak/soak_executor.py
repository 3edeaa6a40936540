"""Area `executor`: rounds over real processes, a form after the other, and between them rounds
of the property machines for a share of the time. It ends at the first violation."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from random import Random

import psutil

from tests.soak.soak_forms import SOAKED
from tests.soak.soak_machines import MACHINES, run_machine
from tests.soak.soak_report import Report
from tests.soak.soak_round import play
from tests.support import ray_cluster
from tests.support.executor_forms import RAY
from tests.support.processes import command_of

MACHINE_SHARE = 0.25
NUM_CLIENTS = (150, 300, 500)


def run(minutes: float, seed: int, forms: list[str] | None) -> Report:
    chosen = tuple(forms or SOAKED)
    unknown = [form for form in chosen if form not in SOAKED]
    if unknown:
        sys.exit(f"--form is {unknown[0]!r}; it must be one of {', '.join(SOAKED)}")
    command = shlex.join(["scripts/soak", *sys.argv[1:]])
    report = Report(seed=seed, minutes=minutes, command=command)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        rounds = _rounds(seed, chosen, began_s + 60 * minutes)
        _soak(report, rounds, _Cluster(stack), began_s)
    report.minutes = (time.monotonic() - began_s) / 60
    return report


def _rounds(seed: int, forms: tuple[str, ...], ends_at_s: float) -> Iterator[tuple[str, int]]:
    """Every form once at least. The first of each list has the seed itself."""
    number = 0
    while number < len(forms) or time.monotonic() < ends_at_s:
        yield forms[number % len(forms)], seed + number
        number += 1


class _Cluster:
    """Started when the first round wants it; it lives until the soak ends."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._address = ""

    def __call__(self) -> str:
        self._address = self._address or self._stack.enter_context(ray_cluster.started()).address
        return self._address


def _soak(
    report: Report, rounds: Iterator[tuple[str, int]], cluster: Callable[[], str], began_s: float
) -> None:
    machine_s = 0.0
    for form, seed in rounds:
        machine_began_s = time.monotonic()
        if machine_s <= MACHINE_SHARE * (machine_began_s - began_s):
            _machine_round(report, seed)
            machine_s += time.monotonic() - machine_began_s
        if not report.violations:
            _form_round(report, form, seed, cluster)
        if report.violations:
            print(f"VIOLATION\n{report.violations[0]}", flush=True)
            _end_what_is_left()
            return


def _machine_round(report: Report, seed: int) -> None:
    name = tuple(MACHINES)[report.machines.total() % len(MACHINES)]
    try:
        run_machine(name, seed)
    except Exception:
        report.violations.append(f"machine {name}, seed {seed}\n{traceback.format_exc()}")
    report.machines[name] += 1
    report.examples[name] += MACHINES[name][1]


def _form_round(report: Report, form: str, seed: int, cluster: Callable[[], str]) -> None:
    num_clients = Random(seed).choice(NUM_CLIENTS)
    logging.disable(logging.CRITICAL)  # deaths are told at length
    try:
        told = play(form, seed, num_clients, cluster if form in RAY else str)
    finally:
        logging.disable(logging.NOTSET)
    report.add(told)
    deeds = ", ".join(deed.name for deed in told.deeds) or "nothing"
    print(
        f"{form} seed {seed}: {told.num_requests} requests, {deeds}; "
        f"{'VIOLATION' if told.violation else 'well'}",
        flush=True,
    )


def _end_what_is_left() -> None:
    for process in psutil.Process().children(recursive=True):
        if "ray_cluster" not in command_of(process):
            with contextlib.suppress(psutil.Error):
                process.kill()
