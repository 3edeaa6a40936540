"""`baton up` and the commands that ask it, as real processes with the scripted engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cli_up import assert_gone, baton, running_up, write_cluster

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def shared_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The runtime folder of a cluster that no test harms."""
    with running_up(tmp_path_factory.mktemp("shared")) as up:
        yield up.runtime_dir


def settled_status(runtime_dir: str) -> dict[str, Any]:
    """`baton status --json`, once nothing is held or open any more."""
    deadline = time.monotonic() + 5
    while True:
        told = baton("status", "--json", "--runtime-dir", runtime_dir)
        assert told.returncode == 0, told.stderr
        picture: dict[str, Any] = json.loads(told.stdout)
        held = [
            count
            for server in picture["servers"]
            for key in ("blocks_by_owner", "ledger_entries")
            for count in server[key].values()
        ]
        if not any(held):
            return picture
        assert time.monotonic() < deadline, told.stdout


def test_ctrl_c_stops_clean(tmp_path: Path) -> None:
    with running_up(tmp_path) as up:
        processes = up.all_processes()
        code, out = up.stop(signal.SIGINT)
    assert code == 0, out
    assert_gone(processes)


def test_up_answers_tells_its_state_and_stops_clean(tmp_path: Path) -> None:
    with running_up(tmp_path) as up:
        processes = up.all_processes()
        assert len(processes) >= 5  # three servers and two engine workers
        where = ("--runtime-dir", up.runtime_dir)
        seeded = ("--seed", "7", *where)
        asked = baton("generate", "the quick brown fox", "--max-tokens", "5", "--json", *seeded)
        assert asked.returncode == 0, asked.stderr
        answer = json.loads(asked.stdout)
        assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 5
        assert answer["finish_reason"] == "length"
        assert answer["kv"]["transferred_bytes"] > 0
        assert answer["kv"]["recomputed_tokens"] == 0
        assert answer["timing"]["ttft_ms"] > 0
        assert answer["external_id"]

        piped = baton("generate", "--max-tokens", "5", *seeded, stdin="the quick brown fox\n")
        assert piped.stdout.removesuffix("\n") == answer["text"]

        picture = settled_status(up.runtime_dir)
        assert picture["router"]["state"] == "ready"
        assert [server["role"] for server in picture["servers"]] == ["context", "generation"]
        for server in picture["servers"]:
            assert server["state"] == "ready"
            assert sum(server["blocks_by_state"].values()) == 64
        assert "context-0" in baton("status", *where).stdout
        secret = tmp_path / "run/secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600

        code, out = up.stop(signal.SIGTERM)
    assert code == 0, out
    assert "stopped" in out
    assert not (tmp_path / "run/cluster.json").exists()
    assert_gone(processes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "a", "--max-tokens", "0"), "sampling.max_tokens is 0"),
        (("generate", ""), "empty"),
        (("generate", "a", "--top-p", "0"), "sampling.top_p is 0.0"),
        (("generate", "a", "--model", "other"), "other"),
        (("generate", "--prompt-ids", "400"), "token_ids[0] is 400"),
    ],
)
def test_what_the_server_refuses_is_said_in_one_line(
    shared_up: str, arguments: tuple[str, ...], words: str
) -> None:
    asked = baton(*arguments, "--runtime-dir", shared_up)
    assert asked.returncode == 1
    assert words in asked.stderr
    assert asked.stderr.count("\n") == 1
    assert asked.stdout == ""


def test_a_second_up_in_the_same_folder_is_refused(shared_up: str) -> None:
    config = Path(shared_up).parent / "up.yaml"
    second = baton("up", "--config", str(config))
    assert second.returncode == 2
    assert "running in" in second.stderr
    assert second.stderr.count("\n") == 1
    assert (Path(shared_up) / "cluster.json").exists()


@pytest.mark.parametrize("name", ["context-0", "router"])
def test_a_death_is_told_and_ends_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`up` must name the dead process, show its last log lines, and leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="bt-") as scratch:  # short, for sockets are in it
        monkeypatch.setenv("TMPDIR", scratch)
        with running_up(tmp_path) as up:
            processes = up.all_processes()
            pid = up.pid_of(name)
            os.kill(pid, signal.SIGKILL)
            code, out = up.end()
        assert os.listdir(scratch) == []  # not even a killed server's sockets
    assert code == 1
    assert f"{name} (pid {pid}) was killed by SIGKILL" in out
    assert f"name={name}" in out  # its ready line, from its log
    assert_gone(processes)


def test_the_death_of_an_engine_worker_ends_the_cluster(tmp_path: Path) -> None:
    """The server outlives its worker by a moment; what it says of it must be shown."""
    with running_up(tmp_path) as up:
        processes = up.all_processes()
        pid = up.pid_of("generation-0")
        workers = psutil.Process(pid).children(recursive=True)
        for worker in workers:
            worker.kill()
        code, out = up.end()
    assert code == 1
    assert f"generation-0 (pid {pid}) exited with code 70" in out
    assert str(workers[0].pid) in out
    assert_gone(processes)


def test_a_killed_launcher_takes_its_cluster_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left its processes' socket folder in /tmp for ever."""
    with (
        tempfile.TemporaryDirectory(prefix="bt-") as scratch,
        tempfile.TemporaryDirectory(prefix="bt-") as folder,  # short, for sockets are in it
    ):
        monkeypatch.setenv("TMPDIR", scratch)
        with running_up(Path(folder)) as up:
            processes = up.all_processes()
            up.process.kill()
            up.process.wait()
            assert_gone(processes)
            assert baton("status", "--runtime-dir", up.runtime_dir).returncode == 1
        assert os.listdir(scratch) == []
        assert os.listdir(f"{folder}/run/tmp") == []


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        config = write_cluster(tmp_path, router={"listen": address})
        done = baton("up", "--config", str(config))
    assert done.returncode == 2
    assert f"router.listen: {address} is not free" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "starting" not in done.stdout


def test_a_model_that_is_nowhere_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = write_cluster(tmp_path, model=str(tmp_path / "nowhere"))
    done = baton("up", "--config", str(config))
    assert done.returncode == 2
    assert "nowhere', which does not exist" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "starting" not in done.stdout


def test_a_server_that_cannot_work_as_configured_says_why_and_no_more(tmp_path: Path) -> None:
    """A wrong --device or --tls ended in exit code 1 and a dozen log lines, some doubled."""
    (tmp_path / "empty").mkdir()
    config = write_cluster(tmp_path, model=str(tmp_path / "empty"))
    done = baton("up", "--config", str(config))
    assert done.returncode == 2, done.stderr
    assert "cannot start: " in done.stderr
    assert str(tmp_path / "empty") in done.stderr
    assert "baton doctor" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout


def test_servers_that_cannot_pair_are_told_at_the_start(tmp_path: Path) -> None:
    """`up` said that the router listens, and every request then failed."""
    uneven = {"engine": {"kv_cache": {"tokens_per_block": 32}}}
    done = baton("up", "--config", str(write_cluster(tmp_path, context=uneven)))
    assert done.returncode == 2
    assert "cannot serve together" in done.stderr
    assert "tokens_per_block 32 against 16" in done.stderr
    assert "Traceback" not in done.stderr
