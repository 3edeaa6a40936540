"""The Launcher contract, run for every launcher: ranks come up, know each other, have UCX, end.

Each test starts a whole executor whose world has members, through `create`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protos.errors import ConfigError
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import audited, collect, request, running, tokens
from tests.support.worlds import ranked

pytestmark = pytest.mark.system
LAUNCHERS = ("spawn", "mpi")
UCX = {"tls": "tcp,self,posix,cma", "net_devices": ""}


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_ucx_opens_in_every_rank_and_every_rank_answers(launcher: str) -> None:
    """Guards: MPI's older UCX loaded first, which breaks ours in that process alone."""
    async with running(ranked(launcher, 2)) as executor:
        assert tokens(await collect(executor.submit(request())))
        described = await executor.collective_rpc("describe")
        assert [facts["rank"] for facts in described] == [0, 1]
        assert tuple(facts["pid"] for facts in described) == executor.worker_pids
        checked = await executor.collective_rpc("check_transport", **UCX)
        assert [bool(facts["wires"]) for facts in checked] == [True, True]
        await audited(executor)


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_a_failed_load_shows_the_ranks_own_error(launcher: str) -> None:
    with pytest.raises(ConfigError, match="no such weights"):
        async with running(ranked(launcher, 2, load_error="no such weights")):
            pass


async def test_one_log_line_says_which_launcher_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with running(ranked("auto", 2)) as executor:
            assert len(executor.worker_pids) == 2
    lines = [line for line in caplog.messages if "by launcher" in line]
    assert lines == [
        "world of test: 2 rank(s) by launcher mpi, because several ranks are asked for and "
        "mpi4py is installed"
    ]
