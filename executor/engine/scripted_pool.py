"""The scripted engine's KV pool: numbered blocks with named holders, and leases.

Nothing is stored in a block; only the bookkeeping is real. A block is free or
live, and a live one has exactly one holder: `sequence:<request id>` until its
request ends, or `lease:<disagg id>` from a context phase's end until release or
expiry.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from protos.messages import DisaggRequestId

TOMBSTONES_MAX = 1024


@dataclass(slots=True)
class Lease:
    pull_token: bytes
    block_ids: tuple[int, ...]
    chain: tuple[bytes, ...]
    """The prompt's block hashes, behind their root."""
    lease_s: float
    ends_at_s: float
    request_ends_at_s: float


class ScriptedPool:
    """Pure: times come in as parameters."""

    def __init__(
        self,
        num_blocks: int,
        leased_share_max: float,
        on_lease_ended: Callable[[Lease], None] = lambda _lease: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.leased_blocks_max = int(num_blocks * leased_share_max)
        self._free: deque[int] = deque()
        self._num_begun = 0
        """Blocks that were ever taken; those from here on are free, and not listed: a pool of
        any size takes memory only for what was used of it."""
        self._holders: dict[int, str] = {}
        self._leases: dict[DisaggRequestId, Lease] = {}
        self._released: OrderedDict[DisaggRequestId, None] = OrderedDict()
        self._num_leased = 0
        self._on_lease_ended = on_lease_ended
        self.counters: dict[str, int] = {}
        self.reset_counters()

    def reset_counters(self) -> None:
        self.counters = {"leases_released": 0, "leases_expired": 0, "leases_renewed": 0}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_begun

    def can_take(self, num_blocks: int, *, num_to_lease: int = 0) -> bool:
        fits_share = self._num_leased + num_to_lease <= self.leased_blocks_max
        return num_blocks <= self.num_free and (num_to_lease == 0 or fits_share)

    def take(self, num_blocks: int, holder: str) -> tuple[int, ...]:
        assert num_blocks <= self.num_free
        num_used = min(num_blocks, len(self._free))
        begun = range(self._num_begun, self._num_begun + num_blocks - num_used)
        block_ids = (*(self._free.popleft() for _ in range(num_used)), *begun)
        self._num_begun += len(begun)
        self._holders.update(dict.fromkeys(block_ids, holder))
        return block_ids

    def give_back(self, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            del self._holders[block_id]
        self._free.extend(block_ids)

    def lease(self, disagg_id: DisaggRequestId, lease: Lease) -> None:
        """The blocks change hands from their sequence to the lease."""
        self._leases[disagg_id] = lease
        self._holders.update(dict.fromkeys(lease.block_ids, f"lease:{disagg_id}"))
        self._num_leased += len(lease.block_ids)

    def leases(self) -> dict[DisaggRequestId, Lease]:
        return dict(self._leases)

    def has_lease(self, disagg_id: DisaggRequestId) -> bool:
        return disagg_id in self._leases

    def was_released(self, disagg_id: DisaggRequestId) -> bool:
        """Released before its lease began: the request must not get one."""
        return disagg_id in self._released

    def release(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        lease = self._leases.get(disagg_id)
        if lease is None:
            self._released[disagg_id] = None
            if len(self._released) > TOMBSTONES_MAX:
                self._released.popitem(last=False)
            return False
        if lease.pull_token != pull_token:
            return False
        self._end(disagg_id, "leases_released")
        return True

    def renew(self, disagg_id: DisaggRequestId, pull_token: bytes, now_s: float) -> bool:
        lease = self._leases.get(disagg_id)
        if lease is None or lease.pull_token != pull_token or lease.ends_at_s <= now_s:
            return False
        lease.ends_at_s = min(now_s + lease.lease_s, lease.request_ends_at_s)
        self.counters["leases_renewed"] += 1
        return True

    def expire(self, now_s: float) -> None:
        for disagg_id in [i for i, lease in self._leases.items() if lease.ends_at_s <= now_s]:
            self._end(disagg_id, "leases_expired")

    def next_expiry_s(self) -> float | None:
        return min((lease.ends_at_s for lease in self._leases.values()), default=None)

    def close(self) -> None:
        for disagg_id in list(self._leases):
            self._end(disagg_id, "leases_released")

    def holders(self) -> dict[int, tuple[str, ...]]:
        return {block_id: (holder,) for block_id, holder in sorted(self._holders.items())}

    def blocks_by_owner(self) -> dict[str, int]:
        counts = {"sequence": 0, "lease": 0}
        for holder in self._holders.values():
            counts[holder.partition(":")[0]] += 1
        return counts

    def check(self) -> None:
        """Raises AssertionError where a block has no holder, or two places."""
        assert len(self._free) + len(self._holders) == self._num_begun <= self.num_blocks
        assert not any(block_id in self._holders for block_id in self._free)
        leased = sum(len(lease.block_ids) for lease in self._leases.values())
        assert leased == self._num_leased == self.blocks_by_owner()["lease"]

    def _end(self, disagg_id: DisaggRequestId, counter: str) -> None:
        lease = self._leases.pop(disagg_id)
        self._num_leased -= len(lease.block_ids)
        self.give_back(lease.block_ids)
        self._on_lease_ended(lease)
        self.counters[counter] += 1
