"""The dispatcher over a real socket pair: every frame, in order, in turns; one crash report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from executor.dispatcher import FRAMES_MAX, Dispatcher, in_one_turn
from executor.engine.seam import EngineOutput
from executor.ipc import TO_WORKER, FrameOpener, FrameReceiver, FrameSealer, FrameSender
from executor.messages import Cancel, Heartbeat, Outputs, ToProxy, ToWorker
from executor.turns import OUTPUTS_A_TURN_MAX, in_turns

KEY = b"k" * 32
UNION: Any = ToWorker
Messages = list[ToWorker]


@contextlib.contextmanager
def dispatching(
    on_messages: Callable[[Messages], None],
    on_crash: Callable[[Exception], None],
    in_turns: Callable[[Messages], list[Messages]] = in_one_turn,
) -> Iterator[FrameSender]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    theirs, ours = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    theirs.bind("inproc://results")
    ours.connect("inproc://results")
    receiver: FrameReceiver[ToWorker] = FrameReceiver(ours, FrameOpener(KEY, TO_WORKER, UNION))
    dispatcher = Dispatcher(
        receiver,
        asyncio.get_running_loop(),
        on_messages=on_messages,
        on_crash=on_crash,
        in_turns=in_turns,
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
    num_frames = 3 * FRAMES_MAX + 1
    crashes: list[Exception] = []
    with dispatching(batches.append, crashes.append) as sender:
        for index in range(num_frames):
            assert sender.send(Cancel(index))
        await settle(lambda: sum(map(len, batches)) == num_frames)
        assert [len(batch) for batch in batches] == [FRAMES_MAX] * 3 + [1]
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
        for index in range(2 * FRAMES_MAX):
            assert sender.send(Cancel(index))
        await settle(lambda: bool(crashes))
        await asyncio.sleep(0.01)
    assert (len(calls), [type(error) for error in crashes]) == (1, [ValueError])


async def test_others_on_the_loop_run_between_the_turns_of_a_batch() -> None:
    """Guards: the first of a thousand streams that reads only once the last was dealt with;
    a new frame that overtakes what waits for its turn."""
    events: list[str] = []
    loop = asyncio.get_running_loop()

    def on_messages(messages: Messages) -> None:
        for message in messages:
            assert isinstance(message, Cancel)
            events.append(f"handled {message.client_id}")
            loop.call_soon(events.append, f"woken {message.client_id}")

    def one_by_one(messages: Messages) -> list[Messages]:
        return [[message] for message in messages]

    crashes: list[Exception] = []
    with dispatching(on_messages, crashes.append, one_by_one) as sender:
        for index in range(FRAMES_MAX + 2):
            assert sender.send(Cancel(index))
        await settle(lambda: len(events) == 2 * (FRAMES_MAX + 2))
    assert events == [
        event for index in range(FRAMES_MAX + 2) for event in (f"handled {index}", f"woken {index}")
    ]


def outputs(first: int, num: int) -> tuple[EngineOutput, ...]:
    return tuple(EngineOutput(request_id=first + index) for index in range(num))


def test_turns_hold_everything_once_and_in_order() -> None:
    """Guards: an acceptance or a bucket that comes with every part, or with none."""
    size = OUTPUTS_A_TURN_MAX
    many = Outputs((1, 2), outputs(0, 2 * size + 5), ((0, b"x"),))
    assert in_turns([many]) == [
        [Outputs((1, 2), many.outputs[:size], ((0, b"x"),))],
        [Outputs((), many.outputs[size : 2 * size])],
        [Outputs((), many.outputs[2 * size :])],
    ]


def test_what_is_little_or_late_comes_in_one_turn() -> None:
    """Guards a frontend that falls behind and stays there, since it wakes for every token."""
    few = Outputs((1, 2), outputs(0, OUTPUTS_A_TURN_MAX))
    many = Outputs((), outputs(100, 5 * OUTPUTS_A_TURN_MAX))
    singles: list[ToProxy] = [few, Heartbeat(1, True)]
    for message in singles:
        assert in_turns([message]) == [[message]]
    assert in_turns([many, many]) == [[many, many]]
