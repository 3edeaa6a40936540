"""Programs that use an LLM and end one way or another: nothing may be left of any.

Each script prints its worker's pids, then what it got. No script has a
`__main__` guard or shuts down unless it says so: that is part of the test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.system
GONE_S_MAX = 5.0
HEAD = """
import asyncio, os, signal, sys, threading, time
from baton import LLM
llm = LLM(engine="scripted", scripted={"step_ms": %s})
%s
print(*llm._executor.worker_pids, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    status: int
    said: list[str]
    errors: str


def run(
    body: str, *, setup: str = "", step_ms: float = 0.0, interrupt_after_s: float | None = None
) -> Ended:
    """Run to its end, and check that its processes and files are gone."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD % (step_ms, setup) + body],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        try:
            assert process.stdout is not None
            pids = [int(word) for word in process.stdout.readline().split()]
            if interrupt_after_s is not None:
                time.sleep(interrupt_after_s)
                process.send_signal(signal.SIGINT)
            said = process.stdout.read()  # not `communicate`: it overlooks what is buffered
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        stderr.seek(0)
        errors = stderr.read()
    assert pids, errors
    _wait_until_gone(pids)
    assert not list(Path(tempfile.gettempdir()).glob(f"baton-ipc-{process.pid}-*"))
    return Ended(process.returncode, said.split("\n")[:-1], errors)


def _wait_until_gone(pids: list[int]) -> None:
    ends_at_s = time.monotonic() + GONE_S_MAX
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < ends_at_s, f"{pids} outlive their program"
        time.sleep(0.02)


def test_a_script_that_just_ends() -> None:
    ended = run("print(len(llm.generate([1, 2], max_tokens=3).token_ids))")
    assert ended == Ended(0, ["3"], "")


def test_a_script_that_ends_with_requests_open() -> None:
    ended = run("r = [llm.generate_async([i], max_tokens=9000) for i in range(200)]", step_ms=5)
    assert (ended.status, ended.said) == (1, [])  # 9000 tokens are more than there is room for
    assert "sampling.max_tokens is 9000" in ended.errors
    ended = run("r = [llm.generate_async([i], max_tokens=900) for i in range(200)]", step_ms=5)
    assert ended == Ended(0, [], "")


def test_a_script_that_fails_in_the_middle() -> None:
    ended = run("s = llm.stream([1], max_tokens=5000); next(s); 1 / 0", step_ms=5)
    assert ended.status == 1
    assert ended.errors.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "Exception ignored" not in ended.errors


def test_a_script_that_is_interrupted_while_it_waits() -> None:
    body = "llm.generate([[i] for i in range(500)], max_tokens=8000)"
    ended = run(body, step_ms=5, interrupt_after_s=0.5)
    assert ended.status == -signal.SIGINT
    assert ended.errors.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in ended.errors


def test_a_script_that_interrupts_itself_in_a_coroutine() -> None:
    body = """
async def main():
    await asyncio.gather(*(llm.generate_async([i], max_tokens=8000) for i in range(100)))
asyncio.run(main())
"""
    ended = run(body, step_ms=5, interrupt_after_s=0.5)
    assert ended.status == -signal.SIGINT
    assert "Exception ignored" not in ended.errors


def test_a_script_whose_engine_is_dead_when_it_ends() -> None:
    body = """
os.kill(llm._executor.worker_pids[0], signal.SIGKILL)
try:
    llm.generate([1], max_tokens=5000)
except Exception as error:
    print(type(error).__name__)
"""
    ended = run(body, step_ms=5)
    assert (ended.status, ended.said) == (0, ["EngineDeadError"])
    assert "Traceback" not in ended.errors


def test_a_script_that_shuts_down_in_a_signal_handler_and_again_at_exit() -> None:
    setup = """
def stop(*_):
    llm.shutdown()
    print("stopped", flush=True)
signal.signal(signal.SIGINT, stop)
"""
    body = """
try:
    llm.generate([[i] for i in range(200)], max_tokens=8000)
except Exception as error:
    print(type(error).__name__)
"""
    ended = run(body, setup=setup, step_ms=5, interrupt_after_s=0.5)
    assert ended == Ended(0, ["stopped", "ServerUnavailableError"], "")


def test_a_forked_child_neither_uses_nor_ends_its_parents_engine() -> None:
    """Guards: a child's exit that stops an engine which is not its own."""
    body = """
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    try:
        llm.generate([1])
    except Exception as error:
        print(type(error).__name__, flush=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(len(llm.generate([1], max_tokens=3).token_ids))
"""
    ended = run(body)
    assert (ended.status, ended.said) == (0, ["ServerUnavailableError", "3"])


def test_a_script_that_dies_of_sigkill() -> None:
    ended = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.status == -signal.SIGKILL
