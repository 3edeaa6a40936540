"""The lease table: who may pull, for how long, and what a late word finds."""

from __future__ import annotations

from kv_transfer.events import Offer
from kv_transfer.leases import Lease, LeaseTable, Refusal
from protos.messages import DisaggRequestId


def key(counter: int) -> DisaggRequestId:
    return DisaggRequestId(1, counter, 0)


def offer(counter: int, lease_s: float = 10.0, deadline_s: float = 100.0) -> Offer:
    return Offer(
        disagg_request_id=key(counter),
        pull_token=b"secret",
        block_ids=(1, 2),
        num_tokens=32,
        lease_s=lease_s,
        deadline_s=deadline_s,
    )


def test_expiry_order_is_not_arrival_order() -> None:
    """F30: the reaper stopped at the first unexpired entry."""
    table = LeaseTable(10)
    table.add(offer(1, lease_s=30.0), now=0.0)
    table.add(offer(2, lease_s=5.0), now=1.0)
    table.add(offer(3, lease_s=3.0), now=2.0)
    assert table.next_expiry() == 5.0
    assert table.expire(6.5) == [key(3), key(2)]
    assert table.next_expiry() == 30.0
    table.check()


def test_renewals_never_outlive_the_deadline() -> None:
    table = LeaseTable(10)
    table.add(offer(1, lease_s=10.0, deadline_s=25.0), now=0.0)
    for now in (8.0, 16.0, 24.0):
        assert table.expire(now) == []
        assert table.renew(key(1), b"secret", now)
    assert table.expire(25.0) == [key(1)]
    assert not table.renew(key(1), b"secret", 25.0)


def test_a_lease_never_outlives_a_deadline_shorter_than_itself() -> None:
    table = LeaseTable(10)
    table.add(offer(1, lease_s=10.0, deadline_s=2.0), now=0.0)
    assert table.expire(2.0) == [key(1)]


def test_only_its_token_opens_a_lease() -> None:
    table = LeaseTable(10)
    table.add(offer(1), now=0.0)
    assert isinstance(table.find(key(1), b"secret"), Lease)
    assert table.find(key(1), b"wrong") == Refusal("token", "the pull token is wrong")
    assert not table.release(key(1), b"wrong")
    assert not table.renew(key(1), b"", 1.0)
    assert key(1) in table


def test_a_release_before_its_offer_refuses_it_and_only_it() -> None:
    table = LeaseTable(10)
    assert not table.release(key(1), b"secret")
    assert not table.release(key(2), b"guess")
    assert table.add(offer(1), now=0.0) == "released"
    assert table.add(offer(2), now=0.0) == "", "a tombstone without the token refuses nothing"
    assert len(table) == 1
    table.check()


def test_late_is_told_from_unknown_within_a_bounded_window() -> None:
    table = LeaseTable(2)
    for counter in (1, 2, 3):
        table.add(offer(counter), now=0.0)
        assert table.end(key(counter), "acked")
        assert not table.end(key(counter), "acked")
    found = [table.find(key(counter), b"secret") for counter in (1, 2, 3)]
    assert [f.reason for f in found if isinstance(f, Refusal)] == ["unknown", "over", "over"]
    table.check()


def test_renewals_do_not_grow_the_heap() -> None:
    """Thousands of renewals of one lease must not cost memory."""
    table = LeaseTable(10)
    table.add(offer(1, deadline_s=1e9), now=0.0)
    for now in range(5000):
        assert table.renew(key(1), b"secret", float(now))
        table.expire(float(now))
    assert len(table._expiries) == 1
