"""Whether this process stands inside an MPI or Slurm job that somebody else started.

The one place of the world that reads or makes an environment: such a job tells its ranks who
they are by it, and nothing else does.
"""

from __future__ import annotations

import os

from protos.errors import ConfigError, InvalidRequestError

MAIN_GUARD_HINT = (
    "where a script is run by every rank, keep its own work under "
    '`if __name__ == "__main__":` and submit in rank 0 alone'
)
ENTRY = "python -m executor.world.under_mpi"
"""Runs a command once for a whole job."""
CONTROL_FD = "BATON_WORLD_FD"
"""Set by our entry under mpirun or srun, for the command that it runs beside rank 0: the number
of an inherited socket to that rank."""

_RANKS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def outer_rank() -> int | None:
    """This process's rank in an outer job of several; None outside of one.

    A batch script's own shell has a SLURM_PROCID too, but is no step of several tasks.
    """
    place = _place()
    return None if place is None else place[0]


def not_leader(rank: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"rank {rank} {what}: rank 0 alone does; {MAIN_GUARD_HINT}",
        field="rank",
        value=rank,
        limit=0,
    )


def refuse_other_ranks() -> None:
    """Raises InvalidRequestError in an outer job's process of another rank than 0."""
    rank = outer_rank()
    if rank:
        raise not_leader(rank, "of an outer job makes no executor")


def refuse_bare_command(what: str) -> None:
    """Of a server's command that every rank of an outer job runs. Raises ConfigError in those
    that could not lead it; rank 0 is told by the choice of its launcher."""
    rank = outer_rank()
    if rank:
        raise ConfigError(
            f"this is rank {rank} of an outer job, and {what} runs once for a whole job: "
            f"start it as `{ENTRY} COMMAND`",
            field="world.launcher",
            value=rank,
        )


def outer_size() -> int | None:
    place = _place()
    return None if place is None else place[1]


def control_descriptor() -> int | None:
    """Of the socket to rank 0's process, where our entry started this command."""
    text = os.environ.get(CONTROL_FD, "")
    return int(text) if text.isdecimal() else None


def forget_control_descriptor() -> None:
    """One world per job: who asks later finds none."""
    os.environ.pop(CONTROL_FD, None)


def command_environment(descriptor: int) -> dict[str, str]:
    """For the command beside rank 0: it is no rank, so the way to MPI's manager is left out."""
    kept = {name: value for name, value in os.environ.items() if name != "PMI_FD"}
    return {**kept, CONTROL_FD: str(descriptor)}


def path_with(folder: str) -> str:
    """The PATH with this folder first."""
    return os.pathsep.join((folder, os.environ.get("PATH", "")))


def _place() -> tuple[int, int] | None:
    for rank_name, size_name in _RANKS:
        rank, size = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return None
