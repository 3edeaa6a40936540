"""A world inside somebody else's mpirun: the job's processes are its ranks, the server is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.executor_baseline import nothing_left
from tests.support.worlds import all_gone

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
WITHIN_S = 1.0
ALLOWANCE = 5
MPIRUN = Path(sys.executable).parent / "mpirun"
SERVER = """
import asyncio, signal, sys, logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from tests.support.executor_scripted import collect, request, running, tokens
from tests.support.worlds import ranked
from protos.errors import EngineDeadError
async def main():
    async with running(ranked("auto", 2, step_ms=5.0)) as executor:
        print("pids", *executor.worker_pids, flush=True)
        described = await executor.collective_rpc("describe")
        print("ranks", *(facts["rank"] for facts in described))
        checked = await executor.collective_rpc(
            "check_transport", tls="tcp,self,posix,cma", net_devices=""
        )
        print("ucx", *(bool(facts["wires"]) for facts in checked))
        print("tokens", len(tokens(await collect(executor.submit(request())))), flush=True)
        if sys.argv[1] == "term":
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
            print("waits", flush=True)
            await told.wait()
        if sys.argv[1] == "wait":
            asked = [
                executor.submit(request(f"r{i}", max_tokens=8000, deadline_s=300.0))
                for i in range(1000)
            ]
            print("pending", flush=True)
            ends = await asyncio.gather(*map(collect, asked), return_exceptions=True)
            assert len({id(end) for end in ends}) == 1, ends
            assert isinstance(ends[0], EngineDeadError)
            open(sys.argv[2], "w").write(ends[0].message)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


ENTRY = ("-m", "executor.world.under_mpi")
SPREAD = """
import sys
from executor.world import under_mpi
under_mpi._spans_hosts = lambda mpi: True
under_mpi.end(under_mpi.main(sys.argv[1:]))
"""


def job(*command: str, entry: tuple[str, str] = ENTRY) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(MPIRUN), "-n", "2", sys.executable, *entry, *command],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{MPIRUN.parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def words(process: subprocess.Popen[str], first: str) -> list[str]:
    """Of the line that begins so. Others are the job's log."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [first]:
            return line.split()[1:]
    raise AssertionError(f"the job ended without a line {first!r}")


@pytest.mark.parametrize("entry", [ENTRY, ("-c", SPREAD)], ids=["one-host", "as-over-hosts"])
def test_the_ranks_of_an_outer_job_serve_and_the_job_ends_with_the_servers_status(
    entry: tuple[str, str],
) -> None:
    """Over hosts everything crosses tcp, as it does here in the second case."""
    process = job(sys.executable, "-c", SERVER, "end", entry=entry)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait(20) == 0, output
    assert "by launcher external, because an outer job of 2 ranks is there already" in output
    for line in ("ranks 0 1", "ucx True True", "tokens 4"):
        assert line in output
    process.stdout.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_job_but_not_the_server(tmp_path: Path, victim: int) -> None:
    """Guards: MPI's tearing down of a job that takes those along who should answer for it."""
    said = tmp_path / "said"
    process = job(sys.executable, "-c", SERVER, "wait", str(said))
    pids = [int(word) for word in words(process, "pids")]
    words(process, "pending")
    os.kill(pids[victim], signal.SIGKILL)
    told = what_was_said(said)
    assert f"the worker of rank {victim} (process {pids[victim]}) is gone" in told
    assert all_gone(pids)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(20) != 0


def what_was_said(file: Path) -> str:
    """By the server, of a death that has just been; in time."""
    ends_at_s = time.monotonic() + ALLOWANCE * WITHIN_S
    while not (file.exists() and (text := file.read_text())):
        assert time.monotonic() < ends_at_s, "the server was told nothing"
        time.sleep(0.02)
    return text


@pytest.mark.parametrize("victim", ["mpirun", "proxy"])
def test_mpis_own_processes_take_the_job_along_but_not_the_server(
    tmp_path: Path, victim: str
) -> None:
    """Bug: without hydra's proxy the ranks ran on, out of mpirun's reach: its SIGTERM reached
    nobody, and its SIGKILL left all of them."""
    said = tmp_path / "said"
    process = job(sys.executable, "-c", SERVER, "wait", str(said))
    pids = [int(word) for word in words(process, "pids")]
    words(process, "pending")
    proxy = psutil.Process(pids[0]).ppid()
    os.kill(process.pid if victim == "mpirun" else proxy, signal.SIGKILL)
    assert "is gone" in what_was_said(said)
    assert all_gone([*pids, proxy])
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(20) != 0


def test_a_server_that_is_killed_takes_the_job_with_it(tmp_path: Path) -> None:
    process = job(
        "/bin/sh", "-c", f'echo server $$; exec "{sys.executable}" -c "$0" wait x', SERVER
    )
    (server,) = words(process, "server")
    pids = [int(word) for word in words(process, "pids")]
    os.kill(int(server), signal.SIGKILL)
    assert process.wait(20) != 0
    assert process.stdout is not None
    process.stdout.close()
    assert all_gone(pids)


def test_a_sigterm_to_the_job_is_the_servers_to_judge() -> None:
    """Guards: members that end by themselves when mpirun passes the signal on to every rank,
    and a job that is then torn down in the middle of the server's orderly end."""
    process = job(sys.executable, "-c", SERVER, "term")
    words(process, "waits")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    assert process.wait(20) == 0, output


def test_a_command_that_starts_no_world_ends_the_job_with_its_status() -> None:
    process = job("/bin/sh", "-c", "exit 7")
    assert process.wait(20) == 7
    assert process.stdout is not None
    process.stdout.close()


def test_a_child_that_the_command_leaves_does_not_hold_the_job_up() -> None:
    """Bug: it had inherited the way to rank 0, which waited for its end instead."""
    process = job("/bin/sh", "-c", "sleep 60 >/dev/null 2>&1 & echo child $!; exit 7")
    (child,) = words(process, "child")
    assert process.wait(20) == 7
    os.kill(int(child), signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()


def test_a_script_that_every_rank_runs_is_told_how_to_start_it() -> None:
    """Guards: rank 0 that makes a world of its own while the others hang."""
    script = (
        "import asyncio\nfrom tests.support.executor_scripted import running\n"
        "from tests.support.worlds import ranked\n"
        "async def main():\n    async with running(ranked('auto', 2)):\n        pass\n"
        "asyncio.run(main())"
    )
    process = subprocess.run(
        [str(MPIRUN), "-n", "2", sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{MPIRUN.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode != 0
    # The first to raise ends the job, and may cut the other one short.
    told = ("needs a command that mpirun or srun runs as", "rank 1 of an outer job makes no")
    assert any(words in process.stderr for words in told)
