"""`baton up` as a process of its own, with the scripted engine, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.text_toys import byte_level_backend, write_folder

START_S = 40.0
STOP_S = 20.0


def baton(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def write_cluster(folder: Path, **over: Any) -> Path:
    """A cluster's YAML with tiny scripted engines; its state goes to `folder`/run."""
    model = write_folder(folder / "toy", byte_level_backend())
    config = {
        "model": str(model),
        "runtime_dir": str(folder / "run"),
        "router": {"listen": "127.0.0.1:0"},
        "engine": {
            "engine": "scripted",
            "scripted": {"vocab_size": 400, "step_ms": 2.0},
            "kv_cache": {"num_blocks": 64},
            # The scripted engine moves no bytes: its leases end by expiry, never by an ack.
            "transfer": {"lease_ms": 200},
        },
        **over,
    }
    path = folder / "up.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Up:
    folder: Path
    process: subprocess.Popen[str]

    @property
    def runtime_dir(self) -> str:
        return str(self.folder / "run")

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "run/cluster.json").read_text())
        return state

    @property
    def address(self) -> str:
        """The router's."""
        processes = self.state["processes"]
        return next(str(item["address"]) for item in processes if item["role"] == "router")

    def pid_of(self, name: str) -> int:
        return next(int(item["pid"]) for item in self.state["processes"] if item["name"] == name)

    def all_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str]:
        """Its exit code and all it printed, once it ends by itself."""
        out, _ = self.process.communicate(timeout=STOP_S)
        return self.process.returncode, out

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.end()


@contextlib.contextmanager
def running_up(folder: Path, **over: Any) -> Iterator[Up]:
    """Up when entered; whatever is left of it at the end is killed."""
    config = write_cluster(folder, **over)
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", "up", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    up = Up(folder, process)
    try:
        _wait_up(up)
        yield up
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
        process.communicate()


def _wait_up(up: Up) -> None:
    deadline = time.monotonic() + START_S
    while not (up.folder / "run/cluster.json").exists():
        assert up.process.stdout is not None
        assert up.process.poll() is None, up.process.stdout.read()
        assert time.monotonic() < deadline, "the cluster did not come up"
        time.sleep(0.05)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
