"""One server of several frontends as an operator has it: a command, its tree, its clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil

from common.security import CONTROL_METADATA_KEY, create_secret, load_secret
from executor.config import ScriptedConfig
from executor.engine.scripted_model import scripted_completion
from protos import control_pb2 as cpb
from protos import control_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.control_codec import ledger_from_proto, server_info_from_proto
from protos.messages import LedgerAudit, ServerInfo
from protos.tokens import pack_token_ids
from tests.support.executor_baseline import Baseline, nothing_of
from tests.support.processes import command_of

ROOT = Path(__file__).resolve().parents[2]
PROMPT = (1, 2, 3)
SEED = 5
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""Each channel is a connection of its own, which one frontend accepts."""


def expected(num_tokens: int) -> list[int]:
    packed = pack_token_ids(PROMPT)
    return list(scripted_completion(packed, SEED, num_tokens, ScriptedConfig()))


def ask(external_id: str = "", max_tokens: int = 10) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        external_id=external_id,
        token_ids=pack_token_ids(PROMPT),
        sampling=pb.SamplingParams(max_tokens=max_tokens, seed=SEED),
    )


def wait_until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    ends_at_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at_s, "not in time"
        time.sleep(0.05)


def write_config(
    folder: Path,
    *,
    listen: str = "127.0.0.1:0",
    engine: str = "",
    script: str = "step_ms: 5",
    more: str = "",
) -> Path:
    """`server.yaml`, with a secret beside it."""
    secret, config = folder / "secret", folder / "server.yaml"
    if not secret.exists():
        create_secret(secret)
    config.write_text(
        f"secret_file: {secret}\nlisten: {listen}\nmetrics_listen: 127.0.0.1:0\n{more}\n"
        f"engine: {{engine: scripted, {engine} scripted: {{{script}}}}}\n"
    )
    return config


class FrontServer:
    """`python -m generation_server` with the scripted engine; `log` holds its stderr."""

    def __init__(self, folder: Path, *flags: str, engine: str = "", more: str = "") -> None:
        config = write_config(folder, engine=engine, more=more)
        self.secret = load_secret(folder / "secret")
        self.log = folder / "log"
        self._before = Baseline.take()
        reader, writer = os.pipe()
        command = (sys.executable, "-m", "generation_server", "--config", str(config))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                (*command, "--ready-fd", str(writer), *flags),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        with os.fdopen(reader) as ready:
            word, _, self.address = ready.readline().strip().partition(" ")
        assert word == "READY", self.log.read_text()
        self._seen: list[psutil.Process] = []
        self._peers: set[tuple[int, int]] = set()
        self.look()

    def look(self) -> list[psutil.Process]:
        """Whoever is below the launcher now; all that was ever seen must end with it."""
        launcher = psutil.Process(self.process.pid)
        now = [launcher, *launcher.children(recursive=True)]
        self._seen += [process for process in now if process not in self._seen]
        return now

    def fronts(self) -> list[psutil.Process]:
        return [p for p in self.look() if "--attach-fd" in command_of(p)]

    def worker(self) -> psutil.Process:
        return next(p for p in self.look() if "executor.world" in command_of(p))

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address, options=OPTIONS)

    def reach_all(self) -> dict[int, grpc.Channel]:
        """A channel to every frontend, by its pid; the kernel deals connections out at random."""
        found: dict[int, grpc.Channel] = {}
        for _ in range(100):
            channel = self.channel()
            inference(channel).Abort(pb.AbortRequest(external_ids=["nobody"]), timeout=10)
            pid = self._newly_connected()
            if pid in found:
                channel.close()
            else:
                found[pid] = channel
            if len(found) == len(self.fronts()):
                return found
        raise AssertionError(f"only {len(found)} frontends were reached")

    def _newly_connected(self) -> int:
        """Who has a connection that was not there when this was last asked."""
        port = int(self.address.rpartition(":")[2])
        peers = {
            (front.pid, each.raddr.port)
            for front in self.fronts()
            for each in front.net_connections()
            if each.raddr and each.laddr.port == port
        }
        (fresh,) = peers - self._peers
        self._peers = peers
        return fresh[0]

    def ledger(self, channel: grpc.Channel) -> LedgerAudit:
        return ledger_from_proto(self._control(channel, "GetLedger", cpb.GetLedgerRequest()))

    def info(self, channel: grpc.Channel) -> ServerInfo:
        answer = self._control(channel, "GetServerInfo", cpb.GetServerInfoRequest())
        return server_info_from_proto(answer)

    def _control(self, channel: grpc.Channel, method: str, message: Any) -> Any:
        metadata = ((CONTROL_METADATA_KEY, self.secret.control_token()),)
        control = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
        return getattr(control, method)(message, metadata=metadata, timeout=10)

    def metrics(self) -> list[str]:
        """The text that each frontend tells, in no order."""
        listens = re.findall(r" metrics listen=(\S+)", self.log.read_text())
        answers = []
        for listen in listens:
            with urllib.request.urlopen(f"http://{listen}/metrics", timeout=10) as answer:
                answers.append(answer.read().decode())
        return answers

    def end(self, within_s: float = 20.0) -> int:
        """The exit status, once all that was ever seen below it is gone, files too. Descriptors
        end with their process; what they hold of the test's is seen at the end of its stdout."""
        code = self.process.wait(within_s)
        _, alive = psutil.wait_procs(self._seen, 10)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"
        nothing_of({process.pid for process in self._seen}, self._before)
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            assert stdout.read() == b""
        return code

    def clean_up(self) -> None:
        """After a test, however it went."""
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self) -> int:
        self.look()
        self.process.send_signal(signal.SIGTERM)
        return self.end()


def inference(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
