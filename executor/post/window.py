"""One bucket's traffic with its worker, as the frontend keeps it. Pure.

    put ──> backlog ──take (while few are unanswered)──> in flight ──on_answer──> gone
                └────────────────── retire ──────────────────┘──> given back

What waits is merged: one `Work` takes all of the backlog that fits. A request's
parameters leave once, with the first outputs that leave after it was opened, or
ahead of them where they do not fit into one message; so a request that its engine
refuses at once costs the worker nothing.

One window serves one worker: a replacement begins with a new one.
"""

from __future__ import annotations

from collections import deque

from executor.post.limits import PostLimits
from executor.post.messages import Work
from executor.postprocess import TextParams
from protos.errors import InvalidRequestError

INT_BYTES = 9
"""At most, as msgpack has it."""
TOKEN_BYTES = 5
PARAMS_ROOM_BYTES = 64


class BucketWindow:
    def __init__(self, limits: PostLimits, bytes_max: int) -> None:
        """`bytes_max`: what one message may have; no payload has more."""
        self._limits = limits
        self._bytes_max = bytes_max
        self._opened: dict[int, TextParams] = {}
        self._forgotten: list[int] = []
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._in_flight: deque[Work] = deque()
        self._next_number = 1
        self.waiting_since_s: float | None = None
        """When the worker last answered or, idle before, was given something; None: idle."""
        self.num_strange = 0
        """Answers that fit no work: dropped."""

    @property
    def is_full(self) -> bool:
        return self._backlog_bytes >= self._limits.backlog_bytes_max

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def backlog_bytes(self) -> int:
        return self._backlog_bytes

    def open(self, client_id: int, params: TextParams) -> None:
        """Before anything of this request can arrive. Raises InvalidRequestError."""
        assert client_id not in self._opened
        num_bytes = params_bytes(params)
        if num_bytes > self._bytes_max:
            raise InvalidRequestError(
                f"output_prefix_token_ids has {len(params.first_token_ids)} tokens; with the stop "
                f"strings it takes {num_bytes} bytes of a message to a postprocess worker, which "
                f"must be at most {self._bytes_max}",
                field="output_prefix_token_ids",
                value=f"{num_bytes} bytes",
                limit=f"{self._bytes_max} bytes",
            )
        self._opened[client_id] = params

    def forget(self, client_id: int) -> None:
        """The request ended without the worker, which hears of it where it may know it."""
        is_unknown = self._opened.pop(client_id, None) is not None or self._next_number == 1
        if not is_unknown:
            self._forgotten.append(client_id)

    def put(self, payload: bytes) -> None:
        self._backlog.append(payload)
        self._backlog_bytes += len(payload)

    def take(self, now_s: float) -> Work | None:
        """What is to be sent now, if anything; it counts as in flight from here on."""
        is_due = bool(self._backlog or self._forgotten)
        if not is_due or len(self._in_flight) >= self._limits.works_in_flight_max:
            return None
        work = self._next_work()
        self._next_number += 1
        self._in_flight.append(work)
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        return work

    def on_answer(self, number: int, now_s: float, *, is_part: bool = False) -> bool:
        """False for an answer that is not the one that is due."""
        if not self._in_flight or self._in_flight[0].number != number:
            self.num_strange += 1
            return False
        if not is_part:
            self._in_flight.popleft()
        self.waiting_since_s = now_s if self._in_flight else None
        return True

    def retire(self) -> list[bytes]:
        """The worker is gone: what it has not answered, in order. Nothing is left here."""
        payloads = [payload for work in self._in_flight for payload in work.payloads]
        payloads += self._backlog
        self._in_flight.clear()
        self._backlog.clear()
        self._backlog_bytes = 0
        self._opened = {}
        self._forgotten = []
        self.waiting_since_s = None
        return payloads

    def check(self) -> None:
        """Raises AssertionError where the figures and the queues disagree."""
        assert self._backlog_bytes == sum(map(len, self._backlog))
        assert len(self._in_flight) <= self._limits.works_in_flight_max
        assert (self.waiting_since_s is None) == (not self._in_flight)
        numbers = [work.number for work in self._in_flight]
        assert numbers == list(range(self._next_number - len(numbers), self._next_number))
        assert not self._opened.keys() & set(self._forgotten)

    def _next_work(self) -> Work:
        """What must come first fills it first; what does not fit is for the next one."""
        opened: list[tuple[int, TextParams]] = []
        payloads: list[bytes] = []
        room = self._bytes_max
        if self._backlog:
            opened, room = self._take_opened(room)
        num_forgotten = room // INT_BYTES
        forgotten = self._forgotten[:num_forgotten]
        del self._forgotten[:num_forgotten]
        room -= INT_BYTES * len(forgotten)
        if self._backlog and not self._opened and not self._forgotten:
            payloads = self._take_payloads(room, is_alone=not (opened or forgotten))
        return Work(self._next_number, tuple(opened), tuple(forgotten), tuple(payloads))

    def _take_opened(self, room: int) -> tuple[list[tuple[int, TextParams]], int]:
        """Those that fit, and the room they leave; one fits always."""
        taken: list[tuple[int, TextParams]] = []
        for client_id, params in self._opened.items():
            num_bytes = params_bytes(params)
            if num_bytes > room:
                break
            room -= num_bytes
            taken.append((client_id, params))
        for client_id, _ in taken:
            del self._opened[client_id]
        return taken, room

    def _take_payloads(self, room: int, *, is_alone: bool) -> list[bytes]:
        """All of the backlog that fits into one message; at least one, where it goes alone."""
        payloads: list[bytes] = []
        num_bytes = 0
        while self._backlog:
            size = num_bytes + len(self._backlog[0])
            most = min(room, self._limits.work_bytes_max) if payloads else room
            if size > most and (payloads or not is_alone):
                break
            payloads.append(self._backlog.popleft())
            num_bytes = size
        self._backlog_bytes -= num_bytes
        return payloads


def params_bytes(params: TextParams) -> int:
    """What an opened request takes in a message, at most; cheaper than to encode it."""
    num_tokens = len(params.context_token_ids) + len(params.first_token_ids)
    stop_bytes = sum(4 * len(stop) + TOKEN_BYTES for stop in params.stop)
    return PARAMS_ROOM_BYTES + TOKEN_BYTES * num_tokens + stop_bytes
