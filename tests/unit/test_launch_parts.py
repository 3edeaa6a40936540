"""The launcher's parts: ports, the runtime folder, one child process."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.launch.child import Child, log_tail
from baton.launch.plan import ProcessPlan
from baton.launch.ports import check_free
from baton.launch.runtime import ClusterState, ProcessState, RuntimeDir, read_state
from protos.errors import ConfigError

STATE = ClusterState(
    router="127.0.0.1:8000",
    secret_file="/run/secret",
    pid=1,
    processes=(ProcessState(name="router", role="router", address="127.0.0.1:8000", pid=2),),
)


def start(tmp_path: Path, what: str) -> Child:
    """`tests.support.cli_process` does `what`."""
    config = tmp_path / "p.yaml"
    config.write_text(what)
    plan = ProcessPlan(name="p", role="context", module="tests.support.cli_process", config={})
    return Child(plan, config, tmp_path / "p.log", scratch=str(tmp_path))


def wait_exit(child: Child) -> None:
    assert select.select([child.pidfd], [], [], 10)[0]


def test_a_taken_port_is_named_with_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"router.listen: {address} is not free"):
            check_free([("context.first_port", "127.0.0.1:0"), ("router.listen", address)])
    check_free([("router.listen", address)])


@pytest.mark.parametrize("address", ["8000", "127.0.0.1:", "127.0.0.1:70000", "no.such.host.:80"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.listen"):
        check_free([("router.listen", address)])


def test_two_keys_cannot_have_one_port() -> None:
    with pytest.raises(ConfigError, match="both ask for"):
        check_free([("a", "127.0.0.1:18999"), ("b", "127.0.0.1:18999")])


def test_one_cluster_per_folder(tmp_path: Path) -> None:
    """A second `up` must not take over the first one's state, nor remove it by failing."""
    first, second = RuntimeDir(tmp_path), RuntimeDir(tmp_path)
    first.acquire()
    first.write_state(STATE)
    with pytest.raises(ConfigError, match="running in"):
        second.acquire()
    second.release()
    assert read_state(tmp_path) == STATE
    first.release()
    assert read_state(tmp_path) is None
    second.acquire()
    second.release()


@pytest.mark.parametrize("name", ["short", "l" * 120])
def test_what_a_killed_launcher_left_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its sockets' folder stayed in /tmp; a path too long for sockets must still work."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("baton.launch.runtime.SCRATCH_LENGTH_MAX", len(str(tmp_path)) + 20)
    script = (
        "import os, sys, pathlib, baton.launch.runtime as r\n"
        "r.SCRATCH_LENGTH_MAX = int(sys.argv[2])\n"
        "folder = r.RuntimeDir(pathlib.Path(sys.argv[1]))\n"
        "folder.acquire()\n"
        "open(folder.scratch + '/socket', 'w').close()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments = (str(tmp_path / name), str(len(str(tmp_path)) + 20))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, *arguments], env=environment, check=False)
    assert len(list(tmp_path.rglob("socket"))) == 1
    runtime = RuntimeDir(tmp_path / name)
    runtime.acquire()
    assert Path(runtime.scratch).is_dir()
    assert list(tmp_path.rglob("socket")) == []
    runtime.release()
    assert not Path(runtime.scratch).exists()
    assert list(tmp_path.glob("baton-up-*")) == []


def test_the_state_of_a_killed_launcher_is_none(tmp_path: Path) -> None:
    """Its file stays behind; nobody holds the lock."""
    runtime = RuntimeDir(tmp_path)
    runtime.acquire()
    runtime.write_state(STATE)
    text = runtime.state_file.read_text()
    runtime.release()
    runtime.state_file.write_text(text)
    assert read_state(tmp_path) is None


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--runtime-dir"):
        RuntimeDir(tmp_path / "file").acquire()


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    runtime = RuntimeDir(tmp_path)
    path = runtime.prepare_secret("")
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert runtime.prepare_secret("").read_text() == text
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        runtime.prepare_secret("")


def test_a_tail_is_short_whatever_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == []
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert log_tail(log, 2) == ["line 99998", "line 99999"]


def test_a_child_tells_its_address_and_stops(tmp_path: Path) -> None:
    child = start(tmp_path, "serve")
    while child.read_ready():
        pass
    assert child.address == "127.0.0.1:4242"
    child.terminate()
    wait_exit(child)
    assert child.has_exited
    assert child.death() == "exited with code 0"
    assert child.end_group()


def test_a_childs_death_is_told_with_its_last_words(tmp_path: Path) -> None:
    child = start(tmp_path, "die")
    assert not any(child.read_ready() for _ in range(3))
    wait_exit(child)
    assert child.has_exited
    assert not child.is_ready
    assert child.death() == "exited with code 3"
    assert child.story("died").endswith("p.log:\n  | no such model")
    child.end_group()


def test_nothing_outlives_a_child(tmp_path: Path) -> None:
    """A killed server must not leave its worker behind."""
    child = start(tmp_path, "leave a grandchild")
    while child.read_ready():
        pass
    grandchild = int((tmp_path / "grandchild").read_text())
    os.kill(child.pid, 9)
    wait_exit(child)
    assert child.has_exited
    assert child.death() == "was killed by SIGKILL"
    pidfd = os.pidfd_open(grandchild)
    child.end_group()
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
