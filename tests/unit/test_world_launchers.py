"""Which launcher is taken and why; which rank of an outer job this process is; orders' own way."""

from __future__ import annotations

import io
import os
import subprocess

import msgspec
import pytest

from executor.config import EngineConfig, WorldConfig
from executor.world.launch import choose_launcher
from executor.world.orders import (
    Orders,
    ProcessName,
    RankBounds,
    open_pidfd,
    pack_orders,
    read_orders,
    start_ticks,
)
from executor.world.outer import (
    CONTROL_FD,
    command_environment,
    control_descriptor,
    outer_rank,
    outer_size,
    refuse_other_ranks,
)
from protos.errors import ConfigError, InvalidRequestError

NAMES = ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", CONTROL_FD, "PMI_FD")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def choose(
    launcher: str, num_ranks: int, *, entry: bool = False, outer: int = 0, mpi: bool = True
) -> tuple[str, str]:
    config = msgspec.convert({"launcher": launcher, "num_ranks": num_ranks}, WorldConfig)
    choice = choose_launcher(config, is_entry=entry, num_outer=outer, has_mpi=mpi)
    return choice.launcher, choice.why


def test_auto_takes_what_is_there() -> None:
    assert choose("auto", 1) == ("spawn", "one rank is asked for")
    assert choose("auto", 2) == ("mpi", "several ranks are asked for and mpi4py is installed")
    assert choose("auto", 2, mpi=False) == ("spawn", "mpi4py is not installed")
    assert choose("auto", 2, entry=True, outer=2) == (
        "external",
        "an outer job of 2 ranks is there already",
    )


def test_what_is_asked_for_by_name_is_taken_or_refused() -> None:
    assert choose("spawn", 2) == ("spawn", "executor.world.launcher is spawn")
    assert choose("spawn", 2, outer=4) == ("spawn", "executor.world.launcher is spawn")
    assert choose("mpi", 1) == ("mpi", "executor.world.launcher is mpi")
    assert choose("external", 2, entry=True, outer=2)[0] == "external"
    with pytest.raises(ConfigError, match=r"extra \[mpi\]"):
        choose("mpi", 1, mpi=False)
    with pytest.raises(ConfigError, match="under_mpi"):
        choose("external", 2)


def test_ranks_of_an_outer_job_are_not_left_idle() -> None:
    """Guards: a rank 0 that quietly spawns a world of its own beside waiting ranks."""
    with pytest.raises(ConfigError, match="under_mpi"):
        choose("auto", 2, outer=2)
    with pytest.raises(ConfigError, match="num_ranks is 1, but the outer MPI job has 2"):
        choose("auto", 1, entry=True, outer=2)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, (0, 4)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (None, None)),  # a batch script's own shell
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (None, None)),
        ({"PMI_RANK": "one", "PMI_SIZE": "2"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_place_in_an_outer_job(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    place: tuple[int | None, int | None],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (outer_rank(), outer_size()) == place


def test_another_rank_of_an_outer_job_makes_no_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_ranks()
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    refuse_other_ranks()
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(InvalidRequestError, match=r"rank 0 alone does.*__main__") as refused:
        refuse_other_ranks()
    assert refused.value.field == "rank"


def test_the_command_beside_rank_0_knows_its_socket_and_is_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_FD", "9")
    assert control_descriptor() is None
    environment = command_environment(7)
    assert "PMI_FD" not in environment
    monkeypatch.setenv(CONTROL_FD, environment[CONTROL_FD])
    assert control_descriptor() == 7


def test_a_process_name_names_one_process_for_ever() -> None:
    own = ProcessName.own()
    assert own.is_here()
    os.close(open_pidfd(own))
    assert start_ticks(own.pid) == own.start_ticks
    with pytest.raises(ProcessLookupError):
        open_pidfd(msgspec.structs.replace(own, start_ticks=own.start_ticks - 1))
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        open_pidfd(ProcessName(child.pid, 1, own.host))
    assert not msgspec.structs.replace(own, host="elsewhere").is_here()


def test_orders_cross_as_plain_data() -> None:
    bounds = RankBounds(
        heartbeat_s=1.0,
        owner_silence_s_max=30.0,
        hello_s_max=60.0,
        leave_s_max=185.0,
        queue_messages_max=1024,
        message_bytes_max=1 << 20,
        tombstones_max=16,
    )
    orders = Orders(
        config=EngineConfig(engine="scripted"),
        name="x",
        rank=1,
        num_ranks=2,
        key=bytes(32),
        status_endpoint="ipc://a",
        leader_endpoint="ipc://b",
        owner=ProcessName.own(),
        bounds=bounds,
    )
    assert read_orders(io.BytesIO(pack_orders(orders))) == orders
