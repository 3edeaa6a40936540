"""A lane within one process: in order, a batch a call, bounded both ways, and never hanging."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from executor.inbox import Inbox
from executor.lane import OWNER_ID
from executor.local_lane import MESSAGES_A_TURN_MAX, InboxSender, LocalAnswers
from executor.messages import Batch, Beat, Cancel, Heartbeat, LoadQuery, Reply, ToProxy


class Loop:
    """Stands for the event loop: calls are counted, and made by `turn`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.is_closed = False

    def call_soon_threadsafe(self, callback: Any) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(callback)

    call_soon = call_soon_threadsafe

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Lane:
    def __init__(self, messages_max: int = 100) -> None:
        self.loop = Loop()
        self.batches: list[list[ToProxy]] = []
        self.crashes: list[Exception] = []
        self.raises = False
        self.answers = LocalAnswers(
            cast(asyncio.AbstractEventLoop, self.loop),
            messages_max=messages_max,
            on_messages=self._on_messages,
            on_crash=self.crashes.append,
        )

    def say(self, number: int) -> bool:
        return self.answers.say(OWNER_ID, Reply(number, True))

    def _on_messages(self, batch: list[ToProxy]) -> None:
        if self.raises:
            raise ZeroDivisionError
        self.batches.append(batch)

    @property
    def numbers(self) -> list[int]:
        return [number for batch in self.batches for number in numbers(batch)]


def numbers(batch: list[ToProxy]) -> list[int]:
    return [message.call_id for message in batch if isinstance(message, Reply)]


def test_what_one_step_says_costs_the_loop_one_call() -> None:
    lane = Lane()
    for number in range(5):
        assert lane.say(number)
    assert len(lane.loop.calls) == 1
    lane.loop.turn()
    assert list(map(numbers, lane.batches)) == [[0, 1, 2, 3, 4]]
    assert lane.answers.num_wakes == 1
    assert lane.say(5)
    assert len(lane.loop.calls) == 1


def test_a_long_batch_leaves_the_others_on_the_loop_their_turn() -> None:
    lane = Lane()
    for number in range(MESSAGES_A_TURN_MAX + 1):
        lane.say(number)
    lane.loop.turn()
    assert len(lane.batches) == 1
    lane.loop.turn()
    assert lane.numbers == list(range(MESSAGES_A_TURN_MAX + 1))
    assert lane.loop.calls == []


def test_the_worker_waits_for_a_loop_that_does_not_read_and_the_heart_does_not() -> None:
    """Guards: answers without bound for a loop that stands still, or a heart that stands too."""
    lane = Lane(messages_max=2)
    said: list[int] = []

    def talk() -> None:
        said.extend(number for number in range(4) if lane.say(number))

    worker = threading.Thread(target=talk)
    worker.start()
    while len(said) < 2:
        worker.join(0.001)
    lane.answers.beat(Heartbeat(1, True))
    worker.join(0.05)
    assert said == [0, 1]
    lane.loop.turn()
    worker.join(5)
    lane.loop.turn()
    assert lane.numbers == [0, 1, 2, 3]


def test_closing_frees_whoever_waits_and_delivers_nothing_more() -> None:
    lane = Lane(messages_max=1)
    assert lane.say(0)
    answers: list[bool] = []
    worker = threading.Thread(target=lambda: answers.append(lane.say(1)))
    worker.start()
    worker.join(0.02)
    lane.answers.close()
    worker.join(5)
    assert answers == [False]
    lane.loop.turn()
    assert lane.batches == []
    assert not lane.say(2)
    assert lane.answers.num_unsaid == 2


def test_a_closed_loop_ends_the_worker_instead_of_killing_it() -> None:
    lane = Lane()
    lane.loop.is_closed = True
    assert not lane.say(0)


def test_a_crash_in_the_handler_is_told_once_and_ends_the_lane() -> None:
    lane = Lane()
    lane.raises = True
    lane.say(0)
    lane.loop.turn()
    assert [type(crash) for crash in lane.crashes] == [ZeroDivisionError]
    assert not lane.say(1)


def test_another_frontends_answer_is_nobodys() -> None:
    lane = Lane()
    assert lane.answers.say(7, Reply(1, True))
    assert (lane.answers.num_unsaid, lane.loop.calls) == (1, [])


def test_a_full_inbox_refuses_and_a_batch_is_unpacked_in_order() -> None:
    inbox = Inbox(2)
    sender = InboxSender(inbox)
    assert sender.send(Batch((Cancel(1), LoadQuery(2))))
    assert not sender.has_room()
    assert not sender.send(Beat())
    assert inbox.take(0) == [(OWNER_ID, Cancel(1)), (OWNER_ID, LoadQuery(2))]
    assert sender.has_room()
    sender.close()
    assert not sender.send(Beat())


async def test_on_a_real_loop_from_a_real_thread() -> None:
    got: list[int] = []
    done = asyncio.Event()

    def on_messages(batch: list[ToProxy]) -> None:
        got.extend(numbers(batch))
        if len(got) == 1000:
            done.set()

    crashes: list[Exception] = []
    answers = LocalAnswers(
        asyncio.get_running_loop(),
        messages_max=8,
        on_messages=on_messages,
        on_crash=crashes.append,
    )
    worker = threading.Thread(
        target=lambda: [answers.say(OWNER_ID, Reply(number, True)) for number in range(1000)]
    )
    worker.start()
    await asyncio.wait_for(done.wait(), 10)
    worker.join()
    assert (got, crashes) == (list(range(1000)), [])
