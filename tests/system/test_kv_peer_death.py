"""A source in another process dies or stops while we pull from it (F4, F12, F39, F40)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.events import Pull, PullFailed, PullFinished, TransferLimits
from kv_transfer.factory import TransportSettings, create_transport
from tests.support.kv_child import layout_of
from tests.support.kv_pair import Node, key, wait_until

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 1.0
BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
pytestmark = pytest.mark.system


class Child:
    """`drop_from`: its segments from this one on are announced but never sent; -1: all are."""

    def __init__(self, tls: str, drop_from: int, num_blocks: int, segment_bytes: int) -> None:
        arguments = [tls, num_blocks, BLOCK_BYTES, segment_bytes, drop_from]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_child", *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = bytes.fromhex(json.loads(self.process.stdout.readline())["address"])

    def pull_of(self, counter: int, num_blocks: int) -> Pull:
        return Pull(
            disagg_request_id=key(counter),
            pull_token=b"token-%d" % counter,
            source_address=self.address,
            source_incarnation=77,
            source_layout=layout_of(BLOCK_BYTES),
            num_source_blocks=num_blocks,
            block_ids=tuple(reversed(range(num_blocks))),
            positions=tuple(range(num_blocks)),
            num_tokens=16,
            deadline_s=30.0,
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture(params=["tcp,self", "tcp,self,posix,cma"])
def tls(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


def make_target(tls: str, num_blocks: int = NUM_BLOCKS) -> Node:
    return Node(
        lambda: create_transport("ucx", TransportSettings(tls=tls, close_s_max=1.0)),
        num_blocks=num_blocks,
        layout=layout_of(BLOCK_BYTES),
        limits=TransferLimits(segment_bytes_max=16 * BLOCK_BYTES, stall_s=STALL_S, heartbeat_s=0.2),
    )


def assert_idle_and_closable(target: Node) -> None:
    audit = target.transceiver.audit()
    assert (audit.pulls, audit.operations) == (0, 0)
    start = time.monotonic()
    target.close()
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_source_lost_with_a_receive_pending(
    tls: str,
    signal_number: signal.Signals,
    children: list[Child],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The posted receive was never met by a message; UCX alone would keep it for ever."""
    child = Child(tls, 2, NUM_BLOCKS, 16 * BLOCK_BYTES)
    children.append(child)
    target = make_target(tls)
    for counter in range(1, 5):
        target.transceiver.pull(child.pull_of(counter, NUM_BLOCKS))
    wait_until(lambda: target.transceiver.audit().operations > 0)
    start = time.monotonic()
    child.process.send_signal(signal_number)
    for counter in range(1, 5):
        failed = target.wait_for(PullFailed, counter, 5.0)
        assert isinstance(failed, PullFailed)
        assert failed.error.kind == "KvTransferError"
    assert time.monotonic() - start < STALL_S + 1.0
    assert_idle_and_closable(target)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_source_lost_while_bytes_flow(
    tls: str, signal_number: signal.Signals, delay_s: float, children: list[Child]
) -> None:
    """Matched receives end by the endpoint's closing, within the bound, and each once."""
    child = Child(tls, -1, 1024, 256 * BLOCK_BYTES)
    children.append(child)
    target = make_target(tls, 1024)
    for counter in range(1, 9):
        target.transceiver.pull(child.pull_of(counter, 1024))
    time.sleep(delay_s)
    start = time.monotonic()
    child.process.send_signal(signal_number)
    target.wait(lambda events: len(events) == 8, 6.0)
    assert time.monotonic() - start < STALL_S + 2.5
    assert len({event.disagg_request_id for event in target.events}) == 8
    assert_idle_and_closable(target)


def test_a_stopped_source_that_goes_on_serves_again(tls: str, children: list[Child]) -> None:
    """F19, F29: the pair is not spoiled, and a new process at a new address works at once."""
    child = Child(tls, -1, NUM_BLOCKS, 16 * BLOCK_BYTES)
    children.append(child)
    target = make_target(tls)
    target.transceiver.pull(child.pull_of(1, NUM_BLOCKS))
    target.wait_for(PullFinished, 1)
    child.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    target.transceiver.pull(child.pull_of(2, NUM_BLOCKS))
    target.wait_for(PullFailed, 2, 5.0)
    child.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    target.transceiver.pull(child.pull_of(3, NUM_BLOCKS))
    target.wait(lambda events: len(events) == 3, 5.0)
    target.transceiver.pull(child.pull_of(4, NUM_BLOCKS))
    target.wait_for(PullFinished, 4, 5.0)
    other = Child(tls, -1, NUM_BLOCKS, 16 * BLOCK_BYTES)
    children.append(other)
    target.transceiver.pull(other.pull_of(5, NUM_BLOCKS))
    target.wait_for(PullFinished, 5, 5.0)
    assert_idle_and_closable(target)


def test_a_source_that_is_gone_before_the_first_contact(tls: str, children: list[Child]) -> None:
    child = Child(tls, -1, NUM_BLOCKS, 16 * BLOCK_BYTES)
    child.end()
    target = make_target(tls)
    start = time.monotonic()
    target.transceiver.pull(child.pull_of(1, NUM_BLOCKS))
    target.wait_for(PullFailed, 1, 5.0)
    assert time.monotonic() - start < STALL_S + 1.0
    assert_idle_and_closable(target)


def test_target_killed_frees_the_source(tls: str, children: list[Child]) -> None:
    """The context side's blocks come back when the generation server dies in mid-pull."""
    script = (
        "import sys, time; from tests.system.test_kv_peer_death import *\n"
        "child = Child.__new__(Child); child.address = bytes.fromhex(sys.argv[2])\n"
        "target = make_target(sys.argv[1])\n"
        "target.transceiver.pull(child.pull_of(1, NUM_BLOCKS))\n"
        "wait_until(lambda: target.transceiver.audit().operations > 0)\n"
        "print('pulling', flush=True); time.sleep(60)\n"
    )
    child = Child(tls, 2, NUM_BLOCKS, 16 * BLOCK_BYTES)
    children.append(child)
    puller = subprocess.Popen(
        [sys.executable, "-c", script, tls, child.address.hex()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert puller.stdout is not None
    assert puller.stdout.readline() == "pulling\n"
    puller.kill()
    puller.wait(10)
    puller.stdout.close()

    def causes() -> list[str]:
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        child.process.stdin.write("causes\n")
        child.process.stdin.flush()
        return list(json.loads(child.process.stdout.readline())["lease_causes"])

    wait_until(lambda: causes() == ["peer_down"], 2 * STALL_S + 1.0)
