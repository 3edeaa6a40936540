"""Frames that are not ours, in every way they can be wrong."""

from __future__ import annotations

import stat
from typing import Any

import pytest
import zmq

from executor.ipc import (
    TO_PROXY,
    TO_WORKER,
    FrameOpener,
    FrameSealer,
    FrameSender,
    PrivateDirectory,
)
from executor.messages import Cancel, Stop, ToWorker
from protos.errors import ConfigError

KEY = b"k" * 32
UNION: Any = ToWorker


def pair() -> tuple[FrameSealer, FrameOpener[ToWorker]]:
    return FrameSealer(KEY, TO_WORKER), FrameOpener(KEY, TO_WORKER, UNION)


def test_frames_come_back_in_order() -> None:
    sealer, opener = pair()
    assert opener.open(sealer.seal(Cancel(5))) == Cancel(5)
    assert opener.open(sealer.seal(Stop())) == Stop()
    assert opener.num_bad == 0


def test_every_flipped_byte_is_noticed() -> None:
    """Guards: a tag that leaves part of the frame (the sequence number) uncovered."""
    sealer, opener = pair()
    frame = sealer.seal(Cancel(5))
    for index in range(len(frame)):
        damaged = frame[:index] + bytes([frame[index] ^ 1]) + frame[index + 1 :]
        assert opener.open(damaged) is None
    assert opener.num_unauthenticated == len(frame)
    assert opener.open(frame) == Cancel(5)


@pytest.mark.parametrize("junk", [b"", b"x", b"x" * 32, b"x" * 39, b"x" * 200])
def test_junk_of_any_length_is_dropped(junk: bytes) -> None:
    _, opener = pair()
    assert opener.open(junk) is None
    assert opener.num_unauthenticated == 1


def test_wrong_key_other_direction_and_replay_are_dropped() -> None:
    """Guards: a frame reflected to its sender, or played twice, being taken for news."""
    sealer, opener = pair()
    assert opener.open(FrameSealer(b"z" * 32, TO_WORKER).seal(Stop())) is None
    assert opener.open(FrameSealer(KEY, TO_PROXY).seal(Stop())) is None
    frame = sealer.seal(Cancel(1))
    assert opener.open(frame) == Cancel(1)
    assert opener.open(frame) is None
    assert (opener.num_unauthenticated, opener.num_replayed) == (2, 1)


def test_authentic_nonsense_is_counted_not_raised() -> None:
    """Guards: a peer of another version whose message ends our receiving thread."""
    sealer, opener = pair()
    assert opener.open(sealer.seal({"no": "message"})) is None
    assert opener.num_malformed == 1


def test_the_folder_is_private_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateDirectory()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="TMPDIR"):
        folder.endpoint("x" * 100)
    assert not folder.path.exists()
    folder.close()


class LeavingPeer:
    """A socket whose peer goes between the look for room and the send, once."""

    def __init__(self) -> None:
        self.has_left = False
        self.sent: list[bytes] = []

    def poll(self, _timeout_ms: int, _flags: int) -> int:
        return 1

    def send(self, frame: bytes, _flags: int) -> None:
        if not self.has_left:
            self.has_left = True
            raise zmq.Again
        self.sent.append(frame)


def test_a_peer_that_leaves_while_it_is_sent_to_is_no_crash_and_no_gap() -> None:
    """A frontend that died in that instant took rank 0's loop, or its status thread, along."""
    peer: Any = LeavingPeer()
    sealer, opener = pair()
    sender = FrameSender(peer, sealer)
    assert not sender.send(Cancel(1))
    assert sender.send(Cancel(2))
    assert opener.open(peer.sent[0]) == Cancel(2)
    assert opener.num_lost == 0
