"""`baton doctor`: can this machine serve."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baton.launch.config import DEFAULT_RUNTIME_DIR

if TYPE_CHECKING:
    from baton.doctor.finding import Finding


@click.command(short_help="Check whether this machine can serve.")
@click.option(
    "--runtime-dir", type=click.Path(path_type=Path), default=DEFAULT_RUNTIME_DIR, show_default=True
)
def doctor(runtime_dir: Path) -> None:
    """Check Python, torch, UCX, MPI, GPUs, limits, ports and the demo model.

    Each line starts with ok, warning or problem; what to do stands under it.
    The exit code is 1 where there is a problem.

    \b
    Example:
      baton doctor
    """
    from baton.doctor.finding import Level

    counts = dict.fromkeys(Level, 0)
    for finding in _findings(runtime_dir):
        counts[finding.level] += 1
        click.echo(str(finding))
    click.echo(", ".join(f"{count} {level}" for level, count in counts.items()))
    if counts[Level.PROBLEM]:
        raise SystemExit(1)


def _findings(runtime_dir: Path) -> Iterator[Finding]:
    from baton.doctor import host, libraries
    from baton.doctor.finding import ok
    from baton.doctor.probe import run_probe

    yield host.check_python()
    yield from host.check_packages()
    yield from libraries.check_torch(*run_probe("torch"))
    yield from libraries.check_ucx(*run_probe("ucx"))
    yield from libraries.check_ucx_variables(os.environ)
    if libraries.has_mpi():
        yield libraries.check_mpi(*run_probe("mpi"))
    else:
        yield ok("MPI: not installed; engine workers are started without it")
    yield host.check_shared_memory()
    yield host.check_ptrace()
    yield from host.check_limits()
    yield host.check_ports(runtime_dir)
    yield host.check_demo_package()
