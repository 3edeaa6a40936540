"""Deaths of a leader, a member and the launcher under every launcher; nothing may be left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from executor.config import HealthConfig
from executor.executor import GenerationExecutor
from executor.health import HealthBounds
from executor.world.mpi_start import mapped_by, opened_by
from protos.errors import EngineDeadError, ServerUnavailableError
from tests.support.executor_scripted import audited, collect, request, running, tokens
from tests.support.processes import command_of
from tests.support.worlds import all_gone, ranked

pytestmark = pytest.mark.system
LAUNCHERS = ("spawn", "mpi")
WITHIN_S = 1.0
ALLOWANCE = 5


def launcher_pid() -> int:
    """Of the small process between us and MPI's ranks."""
    children = psutil.Process().children()
    (found,) = [child for child in children if "executor.world.mpi_launcher" in command_of(child)]
    return int(found.pid)


@pytest.mark.parametrize(
    ("launcher", "victim"), [("spawn", 0), ("spawn", 1), ("mpi", 0), ("mpi", 1), ("mpi", -1)]
)
async def test_any_death_fails_a_thousand_pending_within_a_second(
    launcher: str, victim: int
) -> None:
    """Guards: a member's or launcher's death that nobody notices until a collective call hangs;
    survivors that outlive their world."""
    async with running(ranked(launcher, 2, step_ms=5.0)) as executor:
        results = [executor.submit(request(f"r{i}", max_tokens=1000)) for i in range(1000)]
        await anext(results[0])
        pids = executor.worker_pids
        victim_pid = launcher_pid() if victim < 0 else pids[victim]
        os.kill(victim_pid, signal.SIGKILL)
        killed_at_s = time.monotonic()
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert time.monotonic() - killed_at_s < ALLOWANCE * WITHIN_S
        cause = await executor.wait_dead()
        assert all(end is cause for end in ends)
        assert str(victim_pid) in str(cause)
        assert all_gone(pids)
        with pytest.raises(EngineDeadError) as refused:
            executor.submit(request("late"))
        assert refused.value is cause


@pytest.mark.parametrize(
    ("launcher", "victim"), [("spawn", 1), ("mpi", 0), ("mpi", 1), ("mpi", -1)]
)
async def test_a_death_during_the_load_is_seen_at_once(launcher: str, victim: int) -> None:
    """An out-of-memory kill of any rank while others load: no waiting for the start's bound."""
    pids: list[int] = []

    def kill(stage: str) -> None:
        pids.extend(map(int, stage.partition(" is up")[0].split()[2:]))
        os.kill(launcher_pid() if victim < 0 else pids[victim], signal.SIGKILL)

    started_at_s = time.monotonic()
    with pytest.raises(EngineDeadError, match="MPI launcher" if victim < 0 else "worker of rank"):
        await GenerationExecutor.create(
            ranked(launcher, 2, load_ms=60_000), name="x", progress=kill
        )
    assert time.monotonic() - started_at_s < 4 * ALLOWANCE
    assert len(pids) == 2
    assert all_gone(pids)


BROKEN = """
import sys
if "executor.world.mpi_rank" in sys.orig_argv:
    raise ImportError("no UCX in this rank")
def load_library():
    pass
"""


async def test_a_rank_that_does_not_even_reach_mpi_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: MPI's spawn, which spins for ever where a rank ends before it joined."""
    (tmp_path / "libucx.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    started_at_s = time.monotonic()
    with pytest.raises(EngineDeadError, match="no UCX in this rank"):
        await GenerationExecutor.create(ranked("mpi", 2), name="x")
    assert time.monotonic() - started_at_s < 4 * ALLOWANCE


async def test_a_helper_of_mpi_that_is_killed_during_the_start_ends_it() -> None:
    """Bug: the spawn waited for hydra's proxy for ever, and `create` for the start's 60 s."""
    create = GenerationExecutor.create(ranked("mpi", 2), name="x")
    started_at_s = time.monotonic()
    task = asyncio.create_task(create)
    while not (helpers := mpi_helpers()):
        assert time.monotonic() - started_at_s < ALLOWANCE
        await asyncio.sleep(0.02)
    os.kill(helpers[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="MPI"):
        await task
    assert time.monotonic() - started_at_s < 2 * ALLOWANCE


def mpi_helpers() -> list[int]:
    """Those between MPI's own command and the ranks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "hydra_pmi_proxy":
                found.append(process.pid)
    return found


async def test_a_world_under_mpi_leaves_no_file_of_hydras() -> None:
    """Bug: each left `/tmp/hydra_hwloc_xmlfile_*` behind, of which nobody had heard."""
    async with running(ranked("mpi", 2)):
        (helper,) = mpi_helpers()
        assert not opened_by(helper)


async def test_a_rank_that_is_killed_while_mpi_starts_leaves_no_file() -> None:
    """Bug: MPI then takes down the launcher, which alone knew of the ranks' shared memory."""
    create = GenerationExecutor.create(ranked("mpi", 2), name="x")
    task = asyncio.create_task(create)
    ends_at_s = time.monotonic() + 4 * ALLOWANCE
    while not (mapping := [pid for pid in mpi_ranks() if mapped_by(pid)]):
        assert time.monotonic() < ends_at_s
        await asyncio.sleep(0.001)
    os.kill(mapping[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="MPI"):
        await task


def mpi_ranks() -> list[int]:
    children = psutil.Process().children(recursive=True)
    module = "-m executor.world.mpi_rank"
    return [child.pid for child in children if command_of(child).endswith(module)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_a_cancelled_start_leaves_nothing(launcher: str) -> None:
    """Before a single rank has spoken: who alone knows them must end them."""
    create = GenerationExecutor.create(ranked(launcher, 2), name="x")
    task = asyncio.create_task(create)
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stopped_member_costs_the_open_requests_and_the_world_is_well_again_after() -> None:
    health = HealthBounds(silence_s=0.6, stall_s=10.0, give_up_s=30.0)
    async with running(ranked("spawn", 2, step_ms=5.0), health=health, heartbeat_s=0.2) as executor:
        result = executor.submit(request("x", max_tokens=1000))
        await anext(result)
        member = executor.worker_pids[1]
        os.kill(member, signal.SIGSTOP)
        stopped_at_s = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=rf"rank 1 \(process {member}\) has said"):
            await collect(result)
        assert time.monotonic() - stopped_at_s < ALLOWANCE * 0.8
        with pytest.raises(ServerUnavailableError):
            executor.submit(request("y"))
        os.kill(member, signal.SIGCONT)
        await until_well(executor)
        assert tokens(await collect(executor.submit(request("z"))))
        await audited(executor)


async def until_well(executor: GenerationExecutor) -> None:
    ends_at_s = time.monotonic() + ALLOWANCE
    while True:
        try:
            return executor.check_health()
        except ServerUnavailableError:
            assert time.monotonic() < ends_at_s
            await asyncio.sleep(0.05)


async def test_a_member_that_does_not_come_back_is_killed_and_named() -> None:
    health = HealthBounds.of(HealthConfig(silence_ms=300, stall_ms=400, give_up_ms=1000))
    async with running(ranked("spawn", 2), health=health, heartbeat_s=0.1) as executor:
        pids = executor.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        error = await asyncio.wait_for(executor.wait_dead(), ALLOWANCE * 1.2)
        assert f"rank 1 (process {pids[1]}) said nothing for 1 s, and was killed" in error.message
        assert all_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_a_shutdown_does_not_wait_for_a_stopped_member(launcher: str) -> None:
    """Guards: 180 s of patience with a rank that cannot hear."""
    health = HealthBounds(silence_s=0.5, stall_s=10.0, give_up_s=30.0)
    async with running(ranked(launcher, 2), health=health, heartbeat_s=0.1) as executor:
        os.kill(executor.worker_pids[1], signal.SIGSTOP)
        started_at_s = time.monotonic()
        await executor.shutdown()
        assert time.monotonic() - started_at_s < ALLOWANCE


async def test_a_leader_that_dies_while_it_stops_leaves_nobody_waiting() -> None:
    """Bug: rank 0 alone tells members to stop. Killed after it was told so itself, it left rank 1
    beating, and the shutdown took its whole 180 s."""
    async with running(ranked("spawn", 2, step_ms=2000.0)) as executor:
        executor.submit(request("x", max_tokens=100))
        await asyncio.sleep(0.2)
        pids = executor.worker_pids
        stopping = asyncio.create_task(executor.shutdown())
        await asyncio.sleep(0.2)
        os.kill(pids[0], signal.SIGKILL)
        killed_at_s = time.monotonic()
        await stopping
        assert time.monotonic() - killed_at_s < ALLOWANCE
        assert all_gone(pids)


async def test_a_member_told_to_end_by_another_ends_the_world() -> None:
    async with running(ranked("spawn", 2)) as executor:
        os.kill(executor.worker_pids[1], signal.SIGTERM)
        error = await asyncio.wait_for(executor.wait_dead(), ALLOWANCE)
        assert "the worker of rank 1" in error.message
        assert "exited with status 0" in error.message


PARENT = """
import asyncio, sys
from tests.support.executor_scripted import running
from tests.support.worlds import ranked
def say(stage):
    print(stage.partition(" is up")[0], flush=True)
async def main():
    from executor.executor import GenerationExecutor
    load_ms = 60_000.0 if sys.argv[2] == "loading" else 0.0
    await GenerationExecutor.create(ranked(sys.argv[1], 2, load_ms=load_ms), name="x", progress=say)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("phase", ["loading", "serving"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_ends_with_its_owner(launcher: str, phase: str) -> None:
    """Guards: orphaned ranks that hold their memory for ever, and socket or MPI files of theirs."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, launcher, phase],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()[2:]]
    if phase == "serving":
        assert "ready" in parent.stdout.readline()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    assert all_gone(pids)
    assert not list(Path(tempfile.gettempdir()).glob(f"baton-ipc-{parent.pid}-*"))
