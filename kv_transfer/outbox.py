"""What the engine's thread and the transceiver's thread share, under one lock.

The lease table lies here because `offer`, `release` and `renew` must answer the
engine at once, and because an event and the table's change that caused it must
not be seen apart.
"""

from __future__ import annotations

import threading
from collections import Counter, deque

from kv_transfer.events import LeaseEnded, Offer, TransceiverEvent, TransferStarted
from kv_transfer.leases import Lease, LeaseTable, Refusal
from protos.messages import DisaggRequestId


class Outbox:
    def __init__(self, tombstones_max: int) -> None:
        self._lock = threading.Lock()
        self._leases = LeaseTable(tombstones_max)
        self._events: deque[TransceiverEvent] = deque()
        self._counters: Counter[str] = Counter()

    def put(self, event: TransceiverEvent) -> None:
        with self._lock:
            self._events.append(event)

    def drain(self) -> list[TransceiverEvent]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def has_events(self) -> bool:
        return bool(self._events)

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counters[name] += amount

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def offer(self, offer: Offer, now: float) -> None:
        with self._lock:
            cause = self._leases.add(offer, now)
            if cause:
                self._counters["offers_refused"] += 1
                self._events.append(LeaseEnded(offer.disagg_request_id, cause))

    def begin_transfer(self, key: DisaggRequestId, pull_token: bytes) -> Lease | Refusal:
        """The lease, with `TransferStarted` already said, so that no end can overtake it."""
        with self._lock:
            found = self._leases.find(key, pull_token)
            if isinstance(found, Lease):
                self._events.append(TransferStarted(key))
            return found

    def peek(self, key: DisaggRequestId, pull_token: bytes) -> Lease | Refusal:
        with self._lock:
            return self._leases.find(key, pull_token)

    def release(self, key: DisaggRequestId, pull_token: bytes) -> bool:
        with self._lock:
            was_live = self._leases.release(key, pull_token)
            if was_live:
                self._events.append(LeaseEnded(key, "released"))
            return was_live

    def renew(self, key: DisaggRequestId, pull_token: bytes, now: float) -> bool:
        with self._lock:
            return self._leases.renew(key, pull_token, now)

    def touch(self, key: DisaggRequestId, now: float) -> None:
        with self._lock:
            self._leases.touch(key, now)

    def end_lease(self, key: DisaggRequestId, cause: str) -> None:
        with self._lock:
            if self._leases.end(key, cause):
                self._events.append(LeaseEnded(key, cause))

    def expire(self, now: float) -> list[DisaggRequestId]:
        with self._lock:
            over = self._leases.expire(now)
            self._events.extend(LeaseEnded(key, "expired") for key in over)
            return over

    def end_all_leases(self, cause: str) -> None:
        with self._lock:
            self._events.extend(LeaseEnded(key, cause) for key in self._leases.end_all(cause))

    def next_expiry(self) -> float | None:
        with self._lock:
            return self._leases.next_expiry()

    def num_leases(self) -> int:
        with self._lock:
            self._leases.check()
            return len(self._leases)
