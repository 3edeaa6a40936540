"""`--frontends 3` as an operator and clients meet it: one port, one engine, three processes.

A frontend's death costs its own streams; the launcher's and the engine's end everything.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from protos.errors import DuplicateRequestError
from protos.status import error_from_rpc
from tests.support.front_server import (
    ROOT,
    FrontServer,
    ask,
    expected,
    inference,
    wait_until,
    write_config,
)

pytestmark = pytest.mark.system
NUM_STREAMS = 1000
QUICK = "health: {silence_ms: 1000, stall_ms: 3000, give_up_ms: 9000},"


Serve = Callable[..., FrontServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[FrontServer] = []

    def start(*flags: str, **more: str) -> FrontServer:
        servers.append(FrontServer(tmp_path, *flags, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.clean_up()


def tokens(call: Any) -> list[int]:
    return [token for message in call for token in message.token_ids]


class Streams:
    """Many streams on one channel, read in threads of grpc's own."""

    def __init__(self, channel: grpc.Channel, name: str, num: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.calls = [
            inference(channel).Generate(ask(f"{name}-{i}", max_tokens), timeout=60)
            for i in range(num)
        ]
        self.ends: list[list[int] | grpc.RpcError] = []
        self._threads = [
            threading.Thread(target=self._read, args=(self.calls[i::8],)) for i in range(8)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, calls: list[Any]) -> None:
        for call in calls:
            try:
                self.ends.append(tokens(call))
            except grpc.RpcError as error:
                self.ends.append(error)

    def join(self, within_s: float = 60.0) -> None:
        for thread in self._threads:
            thread.join(within_s)
            assert not thread.is_alive()

    def check_all_finished(self) -> None:
        self.join()
        assert self.ends == [expected(self.max_tokens)] * len(self.calls)

    def check_all_unavailable(self) -> None:
        self.join()
        codes = [end.code() for end in self.ends if isinstance(end, grpc.RpcError)]
        assert codes == [grpc.StatusCode.UNAVAILABLE] * len(self.calls)


def close(channels: dict[int, grpc.Channel]) -> None:
    for channel in channels.values():
        channel.close()


def test_three_frontends_serve_one_port_and_know_each_others_requests(serve: Serve) -> None:
    server = serve("--frontends", "3")
    channels = server.reach_all()
    one, other, third = channels.values()
    for channel in channels.values():
        assert tokens(inference(channel).Generate(ask(max_tokens=50))) == expected(50)
    stream = inference(one).Generate(ask("same", max_tokens=5000))
    next(stream)
    with pytest.raises(grpc.RpcError) as refused:
        list(inference(other).Generate(ask("same")))
    assert isinstance(error_from_rpc(refused.value), DuplicateRequestError)
    answer = inference(third).Abort(pb.AbortRequest(external_ids=["same", "nobody"]))
    assert (list(answer.aborted), list(answer.unknown)) == (["same"], ["nobody"])
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    infos = [server.info(channel) for channel in channels.values()]
    told = {(info.name, info.incarnation, info.address, info.state) for info in infos}
    assert told == {("generation-0", infos[0].incarnation, server.address, "ready")}
    pages = server.metrics()
    assert len(pages) == 3
    assert all('baton_requests_total{outcome="ok",role="generation"} 1.0' in p for p in pages)
    assert server.ledger(one).counters["worker_entries_streaming"] == 0
    close(channels)
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


def test_a_killed_frontend_costs_its_own_streams_and_is_replaced(serve: Serve) -> None:
    """With 1,000 requests pending. Guards: work for a client that is gone; an outage of all."""
    server = serve(more="frontends: 3")
    channels = server.reach_all()
    (victim, lost), (_, kept), (_, spare) = channels.items()
    mine = Streams(lost, "lost", NUM_STREAMS // 2, max_tokens=5000)
    theirs = Streams(kept, "kept", NUM_STREAMS // 2, max_tokens=4)
    wait_until(lambda: server.ledger(spare).counters["worker_registered"] >= NUM_STREAMS)
    os.kill(victim, signal.SIGKILL)
    killed_at_s = time.monotonic()
    mine.check_all_unavailable()
    assert time.monotonic() - killed_at_s < 5.0
    theirs.check_all_finished()

    def is_idle() -> bool:
        counters = server.ledger(spare).counters
        return counters["worker_entries_streaming"] + counters["worker_entries_running"] == 0

    wait_until(is_idle, 5.0)
    wait_until(lambda: server.log.read_text().count("frontend_ready") == 4)
    assert victim not in [front.pid for front in server.fronts()]
    close(channels)
    again = server.reach_all()
    for channel in again.values():
        assert tokens(inference(channel).Generate(ask())) == expected(10)
    close(again)
    assert server.stop() == 0


def test_a_stopped_frontend_holds_nobody_up_and_is_replaced(serve: Serve) -> None:
    """Guards: a lane that is waited for; a port that a standing process keeps answering for."""
    server = serve(
        more="frontends: 3",
        engine="executor: {lane_silence_ms: 1000}, " + QUICK,
    )
    channels = server.reach_all()
    (victim, held), (_, kept), (_, spare) = channels.items()
    mine = Streams(held, "held", NUM_STREAMS // 2, max_tokens=5000)
    wait_until(lambda: server.ledger(spare).counters["worker_registered"] >= NUM_STREAMS // 2)
    os.kill(victim, signal.SIGSTOP)
    theirs = Streams(kept, "kept", NUM_STREAMS // 2, max_tokens=4)
    theirs.check_all_finished()
    wait_until(lambda: "frontend_stands_still" in server.log.read_text(), 20.0)
    mine.check_all_unavailable()
    wait_until(lambda: server.log.read_text().count("frontend_ready") == 4)
    assert server.ledger(spare).counters["worker_entries_streaming"] == 0
    close(channels)
    assert server.stop() == 0


@pytest.mark.parametrize("who", ["launcher", "worker"])
def test_the_death_of_the_launcher_or_the_engine_ends_all(who: str, serve: Serve) -> None:
    """With 1,000 requests pending."""
    server = serve("--frontends", "3")
    channels = server.reach_all()
    streams = [
        Streams(channel, str(pid), NUM_STREAMS // 3 + 1, max_tokens=5000)
        for pid, channel in channels.items()
    ]
    (_, channel), *_ = channels.items()
    wait_until(lambda: server.ledger(channel).counters["worker_registered"] >= NUM_STREAMS)
    server.look()
    if who == "launcher":
        server.process.kill()
    else:
        server.worker().kill()
    killed_at_s = time.monotonic()
    for each in streams:
        each.check_all_unavailable()
    assert time.monotonic() - killed_at_s < 5.0
    assert server.end() == (-signal.SIGKILL if who == "launcher" else 70)
    close(channels)
    folders = Path(tempfile.gettempdir()).glob(f"baton-ipc-{server.process.pid}-*")
    assert list(folders) == []
    log = server.log.read_text()
    assert "frontend_killed" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize("is_group", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_drains_every_frontend(is_group: bool, serve: Serve) -> None:
    """A Ctrl-C reaches all of them at once, as a service manager's SIGTERM may: frontends leave
    both to the launcher, and are not hurried by hearing it twice."""
    server = serve(more="frontends: 2\nshutdown_grace_s: 5")
    channels = server.reach_all()
    calls = [inference(channel).Generate(ask(max_tokens=200)) for channel in channels.values()]
    for call in calls:
        next(call)
    server.look()
    if is_group:
        os.killpg(server.process.pid, signal.SIGINT)
    else:
        for front in server.fronts():
            front.terminate()
        server.process.terminate()
    assert [len(tokens(call)) >= 198 for call in calls] == [True, True]
    assert server.end() == 0
    close(channels)
    assert "Traceback" not in server.log.read_text()


def refused(folder: Path, listen: str, **more: str) -> str:
    write_config(folder, listen=listen, **more)
    config = str(folder / "server.yaml")
    done = subprocess.run(
        (sys.executable, "-m", "generation_server", "--config", config, "--frontends", "2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_port_in_use_is_told_at_once(tmp_path: Path) -> None:
    """Guards: SO_REUSEPORT, by which a second server would share the first one's port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert "address already in use" in refused(tmp_path, listen)


def test_an_engine_that_cannot_load_ends_all_with_its_reason(tmp_path: Path) -> None:
    told = refused(tmp_path, "127.0.0.1:0", script="load_error: no such weights")
    assert "no such weights" in told
    assert "Traceback" not in told
