"""A user's program forks while it has an executor: its child is no reason to live on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.executor_baseline import nothing_left

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
END_S_MAX = 10.0


@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_workers_end_though_a_forked_child_lives_on(end: str) -> None:
    """A forked child inherited our ends of the workers' standard inputs, whose end is how they
    are told to stop, and how they see ours: a shutdown waited until it had to kill postprocess
    workers, and after a SIGKILL of the frontend they lived as long as that child."""
    with nothing_left():
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.support.executor_forked"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stderr is not None
        forked, *workers = (psutil.Process(int(pid)) for pid in program.stdout.readline().split())
        assert len(workers) == 3
        try:
            if end == "kill":
                program.kill()
            program.stdin.close()
            program.wait()
            _, alive = psutil.wait_procs(workers, timeout=END_S_MAX)
            assert not alive
            assert forked.is_running()
        finally:
            forked.kill()
            said = program.stderr.read()
            program.stdout.close()
            program.stderr.close()
        assert "does not stop" not in said
