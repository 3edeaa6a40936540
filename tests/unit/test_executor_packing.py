"""What is offered to a queue or said on a lane, packed: whatever it is, nothing breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from executor.engine.control_seam import KvSnapshot
from executor.engine.seam import EngineAudit, EngineOutput
from executor.health import HealthBounds
from executor.ipc import TO_WORKER, FrameOpener, FrameSealer, FrameSender
from executor.messages import (
    AuditReply,
    Batch,
    Call,
    CallReply,
    Cancel,
    CancelNamed,
    Heartbeat,
    KvSnapshotReply,
    Observed,
    Outputs,
    Release,
    Submit,
    ToProxy,
    WorkerFrame,
)
from executor.packing import Packer, body_bytes_max, packed_answers
from executor.queue_watch import QueueWatch
from executor.request import to_engine_request
from executor.request_queue import RequestQueue
from protos.errors import InvalidRequestError
from protos.messages import DisaggRequestId
from tests.support.executor_scripted import request

FRAME_BYTES_MAX = 20_000
BODY_BYTES_MAX = body_bytes_max(FRAME_BYTES_MAX)
KEY = b"k" * 32
UNION: Any = WorkerFrame
ANSWERS: Any = ToProxy


def submit(num_tokens: int = 3, **fields: Any) -> Submit:
    asked = to_engine_request(request(prompt=(5,) * num_tokens), 7)
    return Submit(msgspec.structs.replace(asked, **fields), "a")


class Socket:
    """Sends into a list, while it has room."""

    def __init__(self) -> None:
        self.has_room = True
        self.is_broken = False
        self.frames: list[bytes] = []
        self.meanwhile: list[Callable[[], None]] = []

    def poll(self, _timeout_ms: int, _flags: int) -> int:
        if self.is_broken:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return int(self.has_room)

    def send(self, frame: bytes, _flags: int) -> None:
        while self.meanwhile:
            self.meanwhile.pop()()
        if self.is_broken:
            raise zmq.ZMQError(zmq.ETERM)
        if not self.has_room:
            raise zmq.Again
        self.frames.append(frame)

    def close(self, linger: int) -> None:
        self.is_broken = True


class Wire:
    """A queue, its socket, and the worker's reading of it."""

    def __init__(self, batch_max: int = 1) -> None:
        self.socket = Socket()
        socket: Any = self.socket
        self.opener: FrameOpener[WorkerFrame] = FrameOpener(KEY, TO_WORKER, UNION)
        packer = Packer(FRAME_BYTES_MAX)
        self.queue = RequestQueue(
            FrameSender(socket, FrameSealer(KEY, TO_WORKER)),
            batch_max=batch_max,
            batch_s=60.0,
            loop=asyncio.get_running_loop(),
            packer=packer,
            batch_bytes_max=packer.bytes_max,
        )

    def is_stuck(self) -> bool:
        return self.queue.is_stuck

    def read(self) -> Iterator[Any]:
        for frame in self.socket.frames:
            assert len(frame) <= FRAME_BYTES_MAX
            message = self.opener.open(frame)
            yield from message.messages if isinstance(message, Batch) else (message,)
        self.socket.frames.clear()
        assert (self.opener.num_bad, self.opener.num_lost) == (0, 0)


def test_what_cannot_be_encoded_costs_no_number() -> None:
    """A sealer counted first and encoded then: one bad value was a gap, and the lane's end."""
    sealer = FrameSealer(KEY, TO_WORKER)
    opener: FrameOpener[WorkerFrame] = FrameOpener(KEY, TO_WORKER, UNION)
    with pytest.raises(TypeError):
        sealer.seal(object())
    assert opener.open(sealer.seal(Cancel(1))) == Cancel(1)
    assert opener.num_lost == 0


@pytest.mark.parametrize("batch_max", [1, 4])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("prompt", submit(num_tokens=20_000)),
        ("arguments", Call(1, "load", b"x" * 20_000)),
        ("deadline_s", submit(deadline_s=object())),
        ("disagg_request_id.counter", Release(1, DisaggRequestId(1, 1 << 70, 3), b"")),
        ("external_id", CancelNamed(1, "\udc80")),
    ],
)
async def test_what_cannot_be_sent_is_refused_when_it_is_offered(
    batch_max: int, field: str, message: Any
) -> None:
    """A message too large cut the connection, one that no encoder took stayed at the queue's
    head: every flush raised, and no deadline was ever looked at again."""
    wire = Wire(batch_max)
    assert wire.queue.offer(Cancel(1))
    with pytest.raises(InvalidRequestError) as raised:
        wire.queue.offer(message)
    assert raised.value.field == field
    if field in ("prompt", "arguments"):
        assert raised.value.limit == f"{BODY_BYTES_MAX} bytes"
    wire.queue.put(message)  # of our own, it is told in the log
    assert wire.queue.offer(Cancel(2))
    assert wire.queue.flush()
    assert list(wire.read()) == [Cancel(1), Cancel(2)]


async def test_a_batch_is_bounded_in_bytes_too() -> None:
    """Long prompts that shared a frame made one over the bound, which cut the connection."""
    wire = Wire(batch_max=64)
    messages = [submit(num_tokens=num) for num in (1500, 10, 3900, 1500, 1500, 1500, 10)]
    for message in messages:
        assert wire.queue.offer(message)
        wire.queue.check()
    assert wire.queue.flush()
    assert list(wire.read()) == messages
    wire.queue.check()


@pytest.mark.parametrize("batch_max", [1, 4])
async def test_what_is_put_within_a_send_follows_it(batch_max: int) -> None:
    """Iterators that were dropped in a reference cycle are closed wherever the garbage collector
    runs: in the midst of a send their cancel sent another frame, numbers went out of order, and
    the lane of all was closed as broken."""
    wire = Wire(batch_max)
    wire.socket.meanwhile = [lambda: wire.queue.put(Cancel(2))]
    assert wire.queue.offer(Cancel(1))
    assert wire.queue.flush()
    assert list(wire.read()) == [Cancel(1), Cancel(2)]
    wire.socket.meanwhile = [lambda: wire.queue.put(Cancel(4))]
    wire.queue.put(Cancel(3))
    assert wire.queue.flush()
    assert list(wire.read()) == [Cancel(3), Cancel(4)]
    wire.queue.check()


async def test_a_queue_without_a_socket_raises_nothing() -> None:
    """A flush on a socket that was closed ended the timer that deadlines stand on."""
    for batch_max in (1, 4):
        wire = Wire(batch_max)
        wire.socket.is_broken = True
        wire.queue.put(Cancel(1))
        assert not wire.queue.flush()
        assert wire.is_stuck()
        wire.queue.close()
        wire.queue.put(Cancel(2))
        assert not wire.queue.offer(Cancel(3))
        assert wire.queue.flush()
        assert not wire.is_stuck()
        wire.queue.close()


async def test_stuck_is_what_had_no_room_until_there_is_some() -> None:
    wire = Wire()
    wire.socket.has_room = False
    assert not wire.is_stuck()  # nothing was to be sent
    assert not wire.queue.offer(Cancel(1))
    assert wire.is_stuck()
    wire.socket.has_room = True
    assert not wire.is_stuck()


def test_a_queue_that_is_not_read_counts_as_trouble_although_the_worker_beats() -> None:
    """A connection that was cut left every request to its deadline, and health was good."""
    watch = QueueWatch(HealthBounds(silence_s=3.0, stall_s=10.0, give_up_s=30.0), 1.0, 0.0)
    for now_s in range(1, 32):
        watch.on_tick(now_s, is_stuck=True)
        assert bool(watch.look()) == (now_s > 3)
        watch.is_busy = True  # a step may be long, and what waits is read behind it
        assert bool(watch.look()) == (now_s > 15)
        watch.is_busy = False
        assert watch.is_given_up == (now_s > 30)
    watch.on_tick(32, is_stuck=False)
    assert not watch.look()
    watch.on_tick(33, is_stuck=True)
    watch.on_tick(63, is_stuck=True)  # we stood still ourselves
    assert not watch.look()


def told(message: ToProxy) -> list[Any]:
    bodies = packed_answers(message, BODY_BYTES_MAX)
    assert all(len(memoryview(body)) <= BODY_BYTES_MAX for body in bodies)
    return [msgspec.msgpack.decode(body, type=ANSWERS) for body in bodies]


AUDIT = EngineAudit(
    blocks_by_state={"x" * 20_000: 1},
    blocks_by_owner={},
    holders={},
    sequences_by_state={},
    counters={},
)


@pytest.mark.parametrize(
    "message",
    [
        CallReply(5, (b"x" * 20_000,), None),
        AuditReply(5, AUDIT, {}),
        KvSnapshotReply(5, KvSnapshot(sequence=1 << 70, block_hashes=(b"x",), tokens_per_block=16)),
    ],
)
def test_an_answer_that_cannot_be_sent_is_its_calls_error(message: ToProxy) -> None:
    """An audit over the frame's bound cut the lane: everybody's requests ended with it."""
    (reply,) = told(message)
    assert isinstance(reply, CallReply)
    assert reply.call_id == 5
    assert reply.error is not None
    assert reply.error.kind == "RequestFailedError"


def test_outputs_over_the_bound_are_told_in_parts_and_in_order() -> None:
    outputs = tuple(
        EngineOutput(request_id=n, token_ids=(1 << 20,) * (9000 if n == 3 else 800))
        for n in range(12)
    )
    parts = told(Outputs((1, 2), outputs, ((0, b"x" * 9000), (1, b"y" * 9000))))
    assert parts[0].accepted == (1, 2)
    said = [output for part in parts for output in part.outputs]
    assert [output.request_id for output in said] == list(range(12))
    assert said[3].error is not None  # it alone does not fit: its request fails, no other
    assert said[4] == outputs[4]
    assert [bucket for part in parts for bucket, _ in part.buckets] == [0, 1]


def test_what_is_small_is_told_as_it_is() -> None:
    for message in (Heartbeat(1, True), Outputs((1,), ()), CallReply(1, (b"x",), None)):
        assert told(message) == [message]
    assert told(Observed(None, ())) == [Observed(None, ())]
