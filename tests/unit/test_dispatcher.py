"""The dispatcher over a real socket pair: every frame, in order, in turns; one crash report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from executor.dispatcher import FRAMES_A_TURN_MAX, Dispatcher
from executor.ipc import TO_WORKER, FrameOpener, FrameReceiver, FrameSealer, FrameSender
from executor.messages import Cancel, ToWorker

KEY = b"k" * 32
UNION: Any = ToWorker
Messages = list[ToWorker]


@contextlib.contextmanager
def dispatching(
    on_messages: Callable[[Messages], None], on_crash: Callable[[Exception], None]
) -> Iterator[FrameSender]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    theirs, ours = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    theirs.bind("inproc://results")
    ours.connect("inproc://results")
    receiver: FrameReceiver[ToWorker] = FrameReceiver(ours, FrameOpener(KEY, TO_WORKER, UNION))
    dispatcher = Dispatcher(
        receiver, asyncio.get_running_loop(), on_messages=on_messages, on_crash=on_crash
    )
    dispatcher.start()
    try:
        yield FrameSender(theirs, FrameSealer(KEY, TO_WORKER))
    finally:
        dispatcher.stop()
        dispatcher.stop()
        theirs.close(linger=0)
        context.term()


async def settle(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_done():  # noqa: ASYNC110 - sockets set no event
            await asyncio.sleep(0.001)


async def test_a_burst_comes_in_turns_that_let_others_run() -> None:
    """Guards: frames left in the socket because its descriptor only tells of news; a burst
    that keeps the loop from everybody else."""
    batches: list[Messages] = []
    num_frames = 3 * FRAMES_A_TURN_MAX + 1
    crashes: list[Exception] = []
    with dispatching(batches.append, crashes.append) as sender:
        for index in range(num_frames):
            assert sender.send(Cancel(index))
        await settle(lambda: sum(map(len, batches)) == num_frames)
        assert [len(batch) for batch in batches] == [FRAMES_A_TURN_MAX] * 3 + [1]
        assert [message for batch in batches for message in batch] == [
            Cancel(index) for index in range(num_frames)
        ]
        assert sender.send(Cancel(0))
        await settle(lambda: len(batches) == 5)
    assert not crashes


async def test_a_crash_is_reported_once_and_is_the_end() -> None:
    """Guards: an exception that asyncio merely logs, while what the batch said is lost."""
    calls: list[Messages] = []
    crashes: list[Exception] = []

    def fail(messages: Messages) -> None:
        calls.append(messages)
        raise ValueError("no")

    with dispatching(fail, crashes.append) as sender:
        for index in range(2 * FRAMES_A_TURN_MAX):
            assert sender.send(Cancel(index))
        await settle(lambda: bool(crashes))
        await asyncio.sleep(0.01)
    assert (len(calls), [type(error) for error in crashes]) == (1, [ValueError])
