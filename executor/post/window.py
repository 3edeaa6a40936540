"""One bucket's traffic with its worker, as the frontend keeps it. Pure.

    put ──> backlog ──take (while few are unanswered)──> in flight ──on_answer──> gone
                └────────────────── retire ──────────────────┘──> given back

What waits is merged: one `Work` takes all of the backlog that fits. A request's
parameters leave once, with the first outputs that leave after it was opened;
so a request that its engine refuses at once costs the worker nothing.

One window serves one worker: a replacement begins with a new one.
"""

from __future__ import annotations

from collections import deque

from executor.post.limits import PostLimits
from executor.post.messages import Work
from executor.postprocess import TextParams


class BucketWindow:
    def __init__(self, limits: PostLimits) -> None:
        self._limits = limits
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
        """Before anything of this request can arrive."""
        assert client_id not in self._opened
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
        opened: tuple[tuple[int, TextParams], ...] = ()
        if self._backlog:
            opened, self._opened = tuple(self._opened.items()), {}
        work = Work(self._next_number, opened, tuple(self._forgotten), self._take_payloads())
        self._forgotten = []
        self._next_number += 1
        self._in_flight.append(work)
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        return work

    def on_answer(self, number: int, now_s: float) -> bool:
        """False for an answer that is not the one that is due."""
        if not self._in_flight or self._in_flight[0].number != number:
            self.num_strange += 1
            return False
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

    def _take_payloads(self) -> tuple[bytes, ...]:
        """All of the backlog that fits into one message; at least one."""
        payloads: list[bytes] = []
        num_bytes = 0
        while self._backlog:
            size = len(self._backlog[0])
            if payloads and num_bytes + size > self._limits.work_bytes_max:
                break
            payloads.append(self._backlog.popleft())
            num_bytes += size
        self._backlog_bytes -= num_bytes
        return tuple(payloads)
