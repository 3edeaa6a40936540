"""A lane within one process: no sockets, no sealing; messages stay the objects they are.

Requests go into the worker's inbox, which refuses where it is full. Answers wait in a
bounded hand-over, as they would in a socket, and come to the event loop a batch at a
time, by one call; where the loop does not take them the worker's thread waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from executor.inbox import Inbox
from executor.lane import OWNER_ID
from executor.messages import Batch, Heartbeat, Ready, ToProxy, WorkerFrame

MESSAGES_A_TURN_MAX = 16
"""Then the others on the loop have their turn: whoever was woken reads before more comes."""


class InboxSender:
    """The frontend's end of the requests; `request_queue.Sender` is its contract."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._is_closed = False

    def send(self, message: WorkerFrame) -> bool:
        messages = message.messages if isinstance(message, Batch) else (message,)
        return self.has_room() and self._inbox.offer([(OWNER_ID, each) for each in messages])

    def has_room(self) -> bool:
        return not self._is_closed and self._inbox.has_room()

    def close(self) -> None:
        self._is_closed = True


class LocalAnswers:
    """The worker's end of the answers, for its threads; `close` and the callbacks are the loop's.

    After `close` nothing is delivered, and `say` returns False to whoever waits for room.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        messages_max: int,
        on_messages: Callable[[list[ToProxy]], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._messages_max = messages_max
        self._on_messages = on_messages
        self._on_crash = on_crash
        self._queue: deque[ToProxy] = deque()
        self._condition = threading.Condition()
        self._is_called = False
        self._is_closed = False
        self.num_wakes = 0
        self.num_bad_frames = 0
        """None can be."""
        self.num_unsaid = 0
        """Answers that nobody reads any more."""

    # --- the worker's threads ---------------------------------------------------

    def greet(self, greeting: Ready) -> None:
        self.say(OWNER_ID, greeting)

    def say(self, frontend_id: int, message: ToProxy) -> bool:
        """False once closed."""
        with self._condition:
            while len(self._queue) >= self._messages_max and not self._is_closed:
                self._condition.wait()
            return self._put(frontend_id, message)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Left out where the loop does not read: the next one tells more."""
        with self._condition:
            if len(self._queue) < self._messages_max:
                self._put(OWNER_ID, heartbeat)

    def flush(self) -> bool:
        return True  # nothing is ever held back: whoever has something to say waits

    def _put(self, frontend_id: int, message: ToProxy) -> bool:
        """Under the lock."""
        if self._is_closed or frontend_id != OWNER_ID:
            self.num_unsaid += 1
            return not self._is_closed
        self._queue.append(message)
        if not self._is_called:
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed, and so are we
                self._shut()
                return False
            self._is_called = True
        return True

    # --- the loop ---------------------------------------------------------------

    def close(self) -> None:
        """Safe twice."""
        with self._condition:
            self._shut()

    def _shut(self) -> None:
        self._is_closed = True
        self._queue.clear()
        self._condition.notify_all()

    def _take(self) -> None:
        with self._condition:
            num_messages = min(len(self._queue), MESSAGES_A_TURN_MAX)
            messages = [self._queue.popleft() for _ in range(num_messages)]
            self._is_called = bool(self._queue)
            self._condition.notify_all()
        if self._is_called:
            self._loop.call_soon(self._take)
        if not messages:
            return
        self.num_wakes += 1
        try:
            self._on_messages(messages)
        except Exception as error:
            self.close()
            self._on_crash(error)
