"""The router as a process: start-up, its refusals, READY, signals, what it imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.security import create_secret


def _config(folder: Path, **changes: object) -> Path:
    secret_file = folder / "secret"
    if not secret_file.exists():
        create_secret(secret_file)
    data = {
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "secret_file": str(secret_file),
        "context_servers": ["127.0.0.1:1"],
        "generation_servers": ["127.0.0.1:2"],
        **changes,
    }
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def _run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"genration_servers": []}, "did you mean 'generation_servers'"),
        ({"context_servers": []}, "'context_servers' is []"),
        ({"context_servers": ["127.0.0.1:2"]}, "listed once"),
        ({"context_servers": ["nowhere"]}, "must be HOST:PORT"),
        ({"max_in_flight": 0}, "'max_in_flight' is 0"),
        ({"context_policy": "random"}, "context_policy"),
        ({"secret_file": "/nowhere/secret"}, "cannot read the cluster secret"),
        ({"model": "/nowhere/model"}, "/nowhere/model"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_2(
    tmp_path: Path, changes: dict[str, object], part: str
) -> None:
    """Guards the operator from tracebacks."""
    ended = _run(_config(tmp_path, **changes))
    assert ended.returncode == 2
    assert part in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    """Guards against two routers that share a port without knowing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = _run(_config(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert ended.returncode == 2
    assert "already in use" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_health_and_a_clean_end(tmp_path: Path, number: signal.Signals) -> None:
    """Guards the launcher's handshake, liveness apart from readiness, and exit status 0."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "router", "--config", str(_config(tmp_path)),
            "--ready-fd", str(write_fd),
        ],
        pass_fds=[write_fd],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        line = pipe.readline()
    assert line.startswith("READY 127.0.0.1:")
    with grpc.insecure_channel(line.split()[1]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        statuses = {
            name: stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
            for name in ("liveness", "readiness")
        }
        services = _reflected(channel)
    response = health_pb2.HealthCheckResponse
    assert {"baton.v1.Inference", "baton.v1.Control", "grpc.health.v1.Health"} <= set(services)
    assert "baton_requests_open" in _metrics(process)
    assert statuses == {"liveness": response.SERVING, "readiness": response.NOT_SERVING}
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=10)
    assert (process.returncode, stdout) == (0, "")
    assert "stopped" in stderr
    assert "Traceback" not in stderr


def _reflected(channel: grpc.Channel) -> list[str]:
    """The services that reflection lists."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([ask]), timeout=5)))
    return [service.name for service in answer.list_services_response.service]


def _metrics(process: subprocess.Popen[str]) -> str:
    """What the address in the log's line about metrics answers."""
    assert process.stderr is not None
    address = process.stderr.readline().rpartition("listen=")[2].strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return str(answer.read(), "utf-8")


def test_the_router_imports_no_torch() -> None:
    """Guards the router's size and start: nothing it imports may pull torch or transformers in."""
    program = (
        "import sys, router.__main__; "
        "print([m for m in ('torch', 'transformers', 'ucxx', 'executor', 'serving') "
        "if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert ended.stdout.strip() == "[]", ended.stderr
