"""The check that nothing is left behind: each kind of leak is told, and a stranger's is not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import executor_baseline
from tests.support.executor_baseline import RUN, Baseline, nothing_left, nothing_of

pytestmark = pytest.mark.system
Undo = Callable[[], object]


def nothing() -> None: ...


SLEEP = ("/bin/sleep", "60")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_baseline, "SETTLE_S_MAX", 0.3)


def program(text: str, mark: str = "") -> str:
    """What it prints; it was killed after."""
    environment = {**os.environ, RUN: mark or os.environ[RUN]}
    with subprocess.Popen(
        [sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = process.stdout.readline().strip()
        time.sleep(0.3)  # so that it is seen alive
        process.kill()
    return told


def descriptor() -> tuple[str, Undo]:
    reader, writer = os.pipe()

    def undo() -> None:
        os.close(reader)
        os.close(writer)

    return "'pipe': 2", undo


def thread() -> tuple[str, Undo]:
    end = threading.Event()
    started = threading.Thread(target=end.wait)
    started.start()

    def undo() -> None:
        end.set()
        started.join()

    return "threads: 1", undo


def child() -> tuple[str, Undo]:
    process = subprocess.Popen(SLEEP)

    def undo() -> None:
        process.kill()
        process.wait()

    return f"processes: ['{process.pid} {' '.join(SLEEP)}']", undo


def orphan() -> tuple[str, Undo]:
    """Its parent, a child of ours, was killed."""
    text = f"import subprocess as s; print(s.Popen({SLEEP}, stdout=-3).pid, flush=True); input()"
    pid = int(program(text.replace("input()", "import time; time.sleep(60)")))
    return f"processes: ['{pid} ", lambda: os.kill(pid, signal.SIGKILL)


def folder() -> tuple[str, Undo]:
    """Of a killed child's."""
    text = "from executor.ipc import PrivateDirectory as P; import time; p = P()\n"
    path = Path(program(f"{text}print(p.path, flush=True); time.sleep(60)"))
    return f"folders: ['{path}']", path.rmdir


def shared_memory(mark: str = "") -> tuple[str, Undo]:
    """Of a killed child's that had it open."""
    path = Path(f"/dev/shm/baton-test-{os.getpid()}")
    text = f"import time; f = open('{path}', 'w'); print(flush=True); time.sleep(60)"
    program(text, mark)
    return f"shared memory: ['{path}']", path.unlink


@pytest.mark.parametrize("leak", [descriptor, thread, child, orphan, folder, shared_memory])
def test_a_leak_is_told(leak: Callable[[], tuple[str, Undo]]) -> None:
    undo: Undo = nothing
    told = ""
    try:
        with pytest.raises(AssertionError, match="left behind") as left, nothing_left():
            told, undo = leak()
        assert told in str(left.value)
    finally:
        undo()


def test_strangers_come_and_go_untold() -> None:
    """Another run on this machine: what it holds, and what it leaves when it is killed."""
    undo: Undo = nothing
    theirs = Path(tempfile.mkdtemp(prefix="baton-ipc-7-", dir=executor_baseline.SHARED_TMP))
    try:
        with nothing_left():
            _, undo = shared_memory(mark="strange")
    finally:
        shutil.rmtree(theirs, ignore_errors=True)  # another run may have swept it
        undo()


def test_a_client_may_keep_its_librarys_descriptors_and_threads_but_no_process() -> None:
    (_, close), (_, end) = descriptor(), thread()
    with nothing_left(inside=False):
        (_, close_other), (_, end_other) = descriptor(), thread()
    with pytest.raises(AssertionError, match="sleep 60"), nothing_left(inside=False):
        _, kill = child()
    for undo in (close, end, close_other, end_other, kill):
        undo()


def test_an_ended_servers_folder_is_told_by_its_pid() -> None:
    before = Baseline.take()
    told, undo = folder()
    pid = int(told.partition("baton-ipc-")[2].partition("-")[0])
    with pytest.raises(AssertionError, match="baton-ipc-"):
        nothing_of({pid}, before)
    undo()
    nothing_of({pid}, before)
