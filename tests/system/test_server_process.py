"""`python -m context_server` and its like as an operator meets them: signals, exits, output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from common.security import create_secret
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.tokens import pack_token_ids

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
LONG = pb.GenerateRequest(
    token_ids=pack_token_ids((1, 2, 3)), sampling=pb.SamplingParams(max_tokens=5000)
)


def long_stream(channel: grpc.Channel) -> Any:
    stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    return stub.Generate(LONG, timeout=30)


class Server:
    """One server process with the scripted engine; `stderr` holds its log."""

    def __init__(self, folder: Path, role: str, *flags: str, launcher: tuple[str, ...] = ()):
        secret = folder / "secret"
        if not secret.exists():
            create_secret(secret)
        config = folder / f"{role}.yaml"
        config.write_text(
            f"secret_file: {secret}\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n"
            "engine: {engine: scripted, scripted: {step_ms: 20}}\n"
        )
        self.log = folder / f"{role}.log"
        ready_read, ready_write = os.pipe()
        command = (*launcher, sys.executable, "-m", role, "--config", str(config))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                (*command, "--ready-fd", str(ready_write), *flags),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(ready_write,),
                start_new_session=True,
            )
        os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            word, _, self.address = ready.readline().strip().partition(" ")
        assert word == "READY", self.log.read_text()
        self.tree = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]

    def end(self) -> int:
        """The exit status, once the whole tree is gone."""
        code = self.process.wait(15)
        _, alive = psutil.wait_procs(self.tree, 5)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            assert stdout.read() == b""
        return code

    def worker(self) -> psutil.Process:
        return self.tree[1]


@pytest.mark.parametrize("is_group", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_stops_cleanly_under_load(is_group: bool, tmp_path: Path) -> None:
    """Guards item 6: exit 0, streams told, no orphan; Ctrl-C reaches the whole group at once."""
    server = Server(tmp_path, "context_server")
    with grpc.insecure_channel(server.address) as channel:
        stream = long_stream(channel)
        next(stream)
        if is_group:
            os.killpg(server.process.pid, signal.SIGINT)
        else:
            server.process.terminate()
        with pytest.raises(grpc.RpcError, match="shutting down") as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.end() == 0
    assert "Traceback" not in server.log.read_text()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    server = Server(tmp_path, "context_server")
    os.kill(server.worker().pid, signal.SIGSTOP)  # the worker will not stop when asked
    server.process.terminate()
    time.sleep(0.5)
    begun_s = time.monotonic()
    server.process.terminate()
    code = server.process.wait(5)
    assert time.monotonic() - begun_s < 2
    assert code == 128 + signal.SIGTERM
    os.kill(server.worker().pid, signal.SIGCONT)
    server.end()


def test_a_killed_worker_ends_the_server_with_its_story(tmp_path: Path) -> None:
    server = Server(tmp_path, "generation_server")
    with grpc.insecure_channel(server.address) as channel:
        stream = long_stream(channel)
        next(stream)
        server.worker().kill()
        killed_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert time.monotonic() - killed_s < 2
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.end() == 70
    assert "engine_dead" in server.log.read_text()


def test_a_killed_server_leaves_no_worker(tmp_path: Path) -> None:
    server = Server(tmp_path, "context_server")
    server.process.kill()
    assert server.end() == -signal.SIGKILL


def test_a_server_dies_with_its_launcher_when_asked_to(tmp_path: Path) -> None:
    """Guards orphans of a launcher that was killed without a chance to clean up."""
    launcher = (
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.run(sys.argv[1:], close_fds=False)",
    )
    server = Server(tmp_path, "context_server", "--die-with-parent", launcher=launcher)
    assert len(server.tree) == 3
    server.process.kill()
    assert server.end() == -signal.SIGKILL
    assert "stopping" in server.log.read_text()
