"""A real cluster for tests: each server its own process, started as a deployment would.

`Cluster.start` writes the YAML files, starts `python -m context_server` and so
on with a ready descriptor, and waits until the router sees all of them. The
servers' logs are in `folder`; `Process.tail()` shows the end of one.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import yaml

from common.security import CONTROL_METADATA_KEY, ClusterSecret, create_secret
from protos import control_codec
from protos import control_pb2 as cpb
from protos.control_pb2_grpc import ControlStub
from protos.messages import LedgerAudit, ServerInfo

START_S = 90.0
STOP_S = 20.0
REPOSITORY = Path(__file__).resolve().parents[2]
T = TypeVar("T")


@dataclass
class Process:
    """One server process."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    ready_fd: int
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def worker_pids(self) -> list[int]:
        """The engine workers below this server."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def kill(self) -> None:
        self.popen.kill()

    def metrics(self) -> dict[str, float]:
        """One scrape: `name{labels}` to value. The log tells where the port is."""
        listen = re.findall(r" metrics listen=(\S+)", self.log.read_text(errors="replace"))[-1]
        with urllib.request.urlopen(f"http://{listen}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def tail(self, num_lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


@dataclass
class Cluster:
    """`processes` by name: context-0, generation-0, router."""

    folder: Path
    secret: ClusterSecret
    processes: dict[str, Process] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        folder: Path,
        engine: Mapping[str, Any],
        *,
        tokenizer: Path,
        num_context: int = 1,
        num_generation: int = 1,
        context_engine: Mapping[str, Any] | None = None,
        generation_engine: Mapping[str, Any] | None = None,
        router: Mapping[str, Any] | None = None,
    ) -> Cluster:
        folder.mkdir(parents=True, exist_ok=True)
        cluster = cls(folder, create_secret(folder / "secret"))
        roles = {
            "context": (num_context, context_engine or {}),
            "generation": (num_generation, generation_engine or {}),
        }
        try:
            for role, (count, overrides) in roles.items():
                for index in range(count):
                    cluster.spawn(
                        f"{role}-{index}", f"{role}_server", {"engine": {**engine, **overrides}}
                    )
            for name in list(cluster.processes):
                cluster.wait_ready(name)
            cluster.spawn(
                "router",
                "router",
                {
                    "model": str(tokenizer),
                    "context_servers": cluster.addresses("context"),
                    "generation_servers": cluster.addresses("generation"),
                    **(router or {}),
                },
            )
            cluster.wait_ready("router")
            cluster.wait_servers_up()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def alone(cls, folder: Path, engine: Mapping[str, Any]) -> Cluster:
        """One generation server named `single`, no router: one engine for comparison."""
        folder.mkdir(parents=True, exist_ok=True)
        cluster = cls(folder, create_secret(folder / "secret"))
        cluster.spawn("single", "generation_server", {"engine": engine})
        try:
            cluster.wait_ready("single")
        except BaseException:
            cluster.stop()
            raise
        return cluster

    # --- processes ----------------------------------------------------------

    def spawn(self, name: str, module: str, config: Mapping[str, Any]) -> Process:
        path = self.folder / f"{name}.yaml"
        base = {
            "name": name,
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "secret_file": str(self.folder / "secret"),
        }
        path.write_text(yaml.safe_dump({**base, **config}))
        log = self.folder / f"{name}.log"
        reader, writer = os.pipe()
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    module,
                    "--config",
                    str(path),
                    "--ready-fd",
                    str(writer),
                    "--die-with-parent",
                ],
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
            )
        os.close(writer)
        process = Process(name, popen, log, reader)
        self.processes[name] = process
        return process

    def wait_ready(self, name: str) -> None:
        process = self.processes[name]
        readable, _, _ = select.select([process.ready_fd], [], [], START_S)
        line = os.read(process.ready_fd, 200).decode() if readable else ""
        os.close(process.ready_fd)
        if not line.startswith("READY "):
            raise AssertionError(f"{name} did not start:\n{process.tail()}")
        process.address = line.split()[1]

    def addresses(self, role: str) -> list[str]:
        return [p.address for name, p in self.processes.items() if name.startswith(role)]

    def address(self, name: str = "router") -> str:
        return self.processes[name].address

    def wait_servers_up(self) -> None:
        def all_up() -> bool:
            servers = self.info().servers
            return bool(servers) and all(server.state == "ready" for server in servers)

        wait_until(all_up, START_S, "the router to see every server")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> dict[str, int | None]:
        """One signal to each, router first, then SIGKILL past the bound. Exit codes by name."""
        order = sorted(self.processes.values(), key=lambda p: p.name != "router")
        for process in order:
            if process.popen.poll() is None:
                process.popen.send_signal(number)
        for process in order:
            try:
                process.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait(STOP_S)
        return {process.name: process.popen.returncode for process in order}

    # --- control ------------------------------------------------------------

    def control(self, name: str, method: str, request: Any) -> Any:
        metadata = ((CONTROL_METADATA_KEY, self.secret.control_token()),)
        with grpc.insecure_channel(self.address(name)) as channel:
            call = getattr(ControlStub(channel), method)  # type: ignore[no-untyped-call]
            return call(request, timeout=5.0, metadata=metadata)

    def info(self, name: str = "router") -> ServerInfo:
        return control_codec.server_info_from_proto(
            self.control(name, "GetServerInfo", cpb.GetServerInfoRequest())
        )

    def ledger(self, name: str = "router") -> LedgerAudit:
        return control_codec.ledger_from_proto(
            self.control(name, "GetLedger", cpb.GetLedgerRequest())
        )

    def baseline_complaints(self, names: list[str] | None = None) -> list[str]:
        """What is still held, in words; empty when everything is back at the baseline."""
        complaints = []
        for name in names or [n for n in self.processes if n != "router"]:
            audit = self.ledger(name)
            held = {s: n for s, n in audit.blocks_by_state.items() if s in ("live", "reserved")}
            if any(held.values()):
                complaints.append(f"{name} blocks {held} holders {audit.holders}")
            if any(audit.entries_by_state.values()):
                complaints.append(f"{name} entries {audit.entries_by_state}")
        audit = self.ledger("router")
        if any(audit.entries_by_state.values()):
            complaints.append(f"router entries {audit.entries_by_state}")
        return complaints

    def wait_baseline(self, within_s: float = 5.0) -> None:
        wait_until(lambda: not self.baseline_complaints(), within_s, self.baseline_complaints)


def wait_until(
    condition: Callable[[], bool], within_s: float, what: str | Callable[[], object]
) -> None:
    """Poll until true. `what` says what was waited for, or is asked at the end."""
    give_up = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {within_s} s: {told}")
        time.sleep(0.05)


async def wait_until_async(
    condition: Callable[[], bool], within_s: float, what: str | Callable[[], object]
) -> None:
    await asyncio.to_thread(wait_until, condition, within_s, what)
