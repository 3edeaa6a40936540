"""The lease table against a plain model: who is live, until when, and that all end once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.events import Offer
from kv_transfer.leases import Lease, LeaseTable, Refusal
from protos.messages import DisaggRequestId

KEYS = st.integers(0, 5)
TOKEN, OTHER = b"t" * 16, b"o" * 16
TOMBSTONES_MAX = 64


@dataclass
class Expected:
    lease_s: float
    expires_at: float
    deadline_at: float


def key_of(counter: int) -> DisaggRequestId:
    return DisaggRequestId(1, counter, 0)


class LeaseMachine(RuleBasedStateMachine):
    """Ids are used once, as the engine does; a release may come before its offer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(TOMBSTONES_MAX)
        self.now = 0.0
        self.live: dict[int, Expected] = {}
        self.ended: dict[int, None] = {}

    @rule(counter=KEYS, lease_s=st.floats(0.1, 10), deadline_s=st.floats(0.1, 30))
    def offer(self, counter: int, lease_s: float, deadline_s: float) -> None:
        if counter in self.live:
            return
        offer = Offer(
            disagg_request_id=key_of(counter),
            pull_token=TOKEN,
            block_ids=(1,),
            num_tokens=1,
            lease_s=lease_s,
            deadline_s=deadline_s,
        )
        refused = self.table.add(offer, self.now)
        assert bool(refused) == (counter in self.ended)
        if not refused:
            deadline_at = self.now + deadline_s
            expires_at = min(self.now + lease_s, deadline_at)
            self.live[counter] = Expected(lease_s, expires_at, deadline_at)

    @rule(counter=KEYS)
    def renew(self, counter: int) -> None:
        assert self.table.renew(key_of(counter), TOKEN, self.now) == (counter in self.live)
        self._extend(counter)

    @rule(counter=KEYS)
    def touch(self, counter: int) -> None:
        self.table.touch(key_of(counter), self.now)
        self._extend(counter)

    def _extend(self, counter: int) -> None:
        if counter in self.live:
            one = self.live[counter]
            one.expires_at = max(one.expires_at, min(self.now + one.lease_s, one.deadline_at))

    @rule(counter=KEYS)
    def release(self, counter: int) -> None:
        was_live = self.live.pop(counter, None) is not None
        assert self.table.release(key_of(counter), TOKEN) == was_live
        self.ended[counter] = None

    @rule(counter=KEYS)
    def a_wrong_token_opens_nothing(self, counter: int) -> None:
        found = self.table.find(key_of(counter), OTHER)
        assert isinstance(found, Refusal)
        assert not self.table.renew(key_of(counter), OTHER, self.now)

    @rule(counter=KEYS, cause=st.sampled_from(["acked", "peer_down"]))
    def end(self, counter: int, cause: str) -> None:
        was_live = self.live.pop(counter, None) is not None
        assert self.table.end(key_of(counter), cause) == was_live
        if was_live:
            self.ended[counter] = None

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        """F30: expiry order is not arrival order; nothing that is over stays."""
        self.now += seconds
        over = {key.counter for key in self.table.expire(self.now)}
        assert over == {c for c, one in self.live.items() if one.expires_at <= self.now}
        for counter in over:
            del self.live[counter]
            self.ended[counter] = None

    @invariant()
    def both_say_the_same(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.live)
        for counter, one in self.live.items():
            found = self.table.find(key_of(counter), TOKEN)
            assert isinstance(found, Lease)
            assert found.expires_at == one.expires_at <= one.deadline_at
        next_s = self.table.next_expiry()
        soonest = min((one.expires_at for one in self.live.values()), default=None)
        assert soonest is None or (next_s is not None and next_s <= soonest)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
