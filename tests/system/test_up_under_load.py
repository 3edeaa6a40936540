"""`baton up` with the real model: a process dies while requests run.

Every open request ends by a clear UNAVAILABLE within 2 s of the death (times
five here), the death is told with the last log lines, and nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from baton import AsyncClient
from tests.support.cli_up import Up, assert_gone, running_up
from tests.support.cluster import wait_until_async
from tests.support.golden import demo_model
from tests.support.load import Load

pytestmark = pytest.mark.system
BOUND_S = 2.0
ALLOWANCE = 5
ENGINE = {"num_threads": 1, "kv_cache": {"num_blocks": 512}}


@pytest.mark.parametrize(
    "victim", ["context-0", "generation-0", "context worker", "generation worker"]
)
async def test_a_death_under_load(tmp_path: Path, victim: str) -> None:
    with running_up(tmp_path, model=str(demo_model()), engine=ENGINE) as up:
        processes = up.all_processes()
        async with AsyncClient(up.address) as client:
            load = Load(client)
            streams = [asyncio.ensure_future(load.run_stream(i)) for i in range(12)]
            await wait_until_async(lambda: load.num_tokens > 30, 60, "tokens")
            name, server_pid, pid = _victim(up, victim)
            os.kill(pid, signal.SIGKILL)
            died_s = time.monotonic()
            load.is_over = True
            done, pending = await asyncio.wait(streams, timeout=BOUND_S * ALLOWANCE)
            for stream in done:
                stream.result()
        assert not pending, f"{len(pending)} requests hang"
        assert load.failures, "the death was not under load"
        for at_s, error in load.failures:
            assert error.status == "UNAVAILABLE", error
            assert at_s - died_s < BOUND_S * ALLOWANCE
        code, out = await asyncio.to_thread(up.end)
    assert code == 1
    assert f"{name} (pid {server_pid})" in out
    # Its last log lines: the ready line of a killed server, what a server says of its worker.
    assert (f"name={name}" if pid == server_pid else str(pid)) in out.partition(name)[2]
    assert_gone(processes)


def _victim(up: Up, victim: str) -> tuple[str, int, int]:
    """(the server's name, its pid, the pid to kill)"""
    is_worker = victim.endswith(" worker")
    name = victim.replace(" worker", "-0")
    pid = up.pid_of(name)
    killed = psutil.Process(pid).children(recursive=True)[0].pid if is_worker else pid
    return name, pid, killed
