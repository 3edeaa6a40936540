"""Programs that do not end their executor: they end all the same, and so does what it had."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.executor_baseline import nothing_left

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
END_S_MAX = 10.0


@pytest.mark.parametrize("how", ["forgotten", "hurried"])
def test_a_program_ends_that_does_not_end_its_executor(how: str) -> None:
    """An executor that was never shut down, or whose shutdown was cancelled with its loop, hung
    the program for ever in `gc.collect()`: a zmq context that is collected together with its
    sockets waits for them in its end. And a shutdown that was cut short left its workers."""
    with nothing_left():
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.support.executor_unclosed", how],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        assert program.stdin is not None
        try:
            pids = [int(pid) for pid in program.stdout.readline().split()]
            assert len(pids) == 2
            assert program.stdout.readline() == "its loop has ended\n"
            ends_at_s = time.monotonic() + END_S_MAX
            while how == "hurried" and any(map(_lives, pids)):
                assert time.monotonic() < ends_at_s
                time.sleep(0.02)
            program.stdin.close()
            assert program.wait(END_S_MAX) == 0
        finally:
            program.kill()
            program.wait()
            program.stdin.close()
            program.stdout.close()


def _lives(pid: int) -> bool:
    """Killed and not reaped by its parent is dead enough."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
