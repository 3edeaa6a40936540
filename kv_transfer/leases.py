"""Which blocks wait to be pulled, for how long, and what became of the rest: a pure table.

    offer --> LIVE --end(cause)--> tombstone (bounded window) --> forgotten

A release that overtakes its offer leaves a tombstone that refuses the offer.
A renewal starts the lease's duration anew but never outlives the request's
deadline. Expiry goes by a heap, since leases do not end in the order in which
they came. Times are seconds of any one clock; the caller brings them along.
"""

from __future__ import annotations

import heapq
import hmac
from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.events import Offer
from protos.messages import DisaggRequestId


@dataclass(slots=True)
class Lease:
    offer: Offer
    expires_at: float
    deadline_at: float


@dataclass(frozen=True, slots=True)
class Tombstone:
    cause: str
    pull_token: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a pull gets no lease. `reason` is one of unknown, over, token."""

    reason: str
    message: str


class LeaseTable:
    """Not thread-safe: the transceiver guards it with its lock."""

    def __init__(self, tombstones_max: int) -> None:
        self._tombstones_max = tombstones_max
        self._live: dict[DisaggRequestId, Lease] = {}
        self._tombstones: OrderedDict[DisaggRequestId, Tombstone] = OrderedDict()
        self._expiries: list[tuple[float, DisaggRequestId]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, disagg_request_id: object) -> bool:
        return disagg_request_id in self._live

    def add(self, offer: Offer, now: float) -> str:
        """Empty where the lease is live now, else the cause for which it never was."""
        key = offer.disagg_request_id
        assert key not in self._live, f"{key} offered twice"
        tombstone = self._tombstones.get(key)
        if tombstone and hmac.compare_digest(tombstone.pull_token, offer.pull_token):
            return tombstone.cause
        self._tombstones.pop(key, None)
        deadline_at = now + offer.deadline_s
        expires_at = min(now + offer.lease_s, deadline_at)
        self._live[key] = Lease(offer, expires_at, deadline_at)
        heapq.heappush(self._expiries, (expires_at, key))
        return ""

    def find(self, key: DisaggRequestId, pull_token: bytes) -> Lease | Refusal:
        """The live lease that this token opens."""
        lease = self._live.get(key)
        if lease is not None:
            if hmac.compare_digest(lease.offer.pull_token, pull_token):
                return lease
            return Refusal("token", "the pull token is wrong")
        tombstone = self._tombstones.get(key)
        if tombstone is not None:
            return Refusal("over", f"its lease ended: {tombstone.cause}")
        return Refusal("unknown", "no lease of that id is known here")

    def release(self, key: DisaggRequestId, pull_token: bytes) -> bool:
        """True where a lease was live. An unknown id is remembered as released."""
        found = self.find(key, pull_token)
        if isinstance(found, Lease):
            self.end(key, "released")
            return True
        if found.reason == "unknown":
            self._remember(key, Tombstone("released", pull_token))
        return False

    def renew(self, key: DisaggRequestId, pull_token: bytes, now: float) -> bool:
        found = self.find(key, pull_token)
        if isinstance(found, Lease):
            self._extend(found, now)
            return True
        return False

    def touch(self, key: DisaggRequestId, now: float) -> None:
        """A transfer made progress: the lease goes on as if it were renewed."""
        lease = self._live.get(key)
        if lease is not None:
            self._extend(lease, now)

    def end(self, key: DisaggRequestId, cause: str) -> bool:
        """True where it was live until now."""
        lease = self._live.pop(key, None)
        if lease is None:
            return False
        self._remember(key, Tombstone(cause, lease.offer.pull_token))
        return True

    def expire(self, now: float) -> list[DisaggRequestId]:
        """End what is over; the ids in the order of their expiry."""
        over: list[DisaggRequestId] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            lease = self._live.get(key)
            if lease is None:
                continue
            if lease.expires_at > now:
                heapq.heappush(self._expiries, (lease.expires_at, key))
                continue
            self.end(key, "expired")
            over.append(key)
        return over

    def next_expiry(self) -> float | None:
        """No lease ends before this time."""
        while self._expiries and self._expiries[0][1] not in self._live:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def end_all(self, cause: str) -> list[DisaggRequestId]:
        keys = list(self._live)
        for key in keys:
            self.end(key, cause)
        return keys

    def check(self) -> None:
        assert len(self._tombstones) <= self._tombstones_max
        assert not any(key in self._tombstones for key in self._live)
        queued = {key for _, key in self._expiries}
        assert all(key in queued for key in self._live)

    def _extend(self, lease: Lease, now: float) -> None:
        """The heap learns the new time when the old one comes up, so it never grows by renewals."""
        renewed = min(now + lease.offer.lease_s, lease.deadline_at)
        lease.expires_at = max(lease.expires_at, renewed)

    def _remember(self, key: DisaggRequestId, tombstone: Tombstone) -> None:
        self._tombstones[key] = tombstone
        self._tombstones.move_to_end(key)
        while len(self._tombstones) > self._tombstones_max:
            self._tombstones.popitem(last=False)
