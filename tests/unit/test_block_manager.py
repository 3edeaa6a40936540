"""Which cached blocks are given up first: the order decides how much prefix reuse survives."""

from __future__ import annotations

from executor.engine.kv_cache import BlockManager

A = [b"a0", b"a1", b"a2"]
B = [b"b0", b"b1", b"b2"]


def fill_cache(manager: BlockManager, holder: str, hashes: list[bytes]) -> None:
    for block_id, block_hash in zip(manager.reserve(holder, (), len(hashes)), hashes, strict=True):
        manager.seal(holder, block_id, block_hash)


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head() -> None:
    """Guards reuse: evicting a head makes its whole tail useless, and old must go before new."""
    manager = BlockManager(7, 4)
    fill_cache(manager, "sequence:1", A)
    fill_cache(manager, "sequence:2", B)
    manager.release("sequence:1")
    manager.release("sequence:2")
    manager.reserve("sequence:3", (), 2)
    assert [len(manager.match(chain)) for chain in (A, B)] == [2, 3]
    manager.release("sequence:3")
    manager.reserve("sequence:4", manager.match(A), 0)
    manager.release("sequence:4")
    manager.reserve("sequence:5", (), 3)
    assert [len(manager.match(chain)) for chain in (A, B)] == [2, 2], "a use makes a block young"
    assert manager.num_evicted == 2
    manager.check()


def test_a_live_block_is_never_evicted() -> None:
    """Guards I3: shared by a second holder, a block outlives its first one."""
    manager = BlockManager(3, 4)
    fill_cache(manager, "sequence:1", A[:2])
    manager.hold("lease:1", manager.match(A)[0])
    manager.release("sequence:1")
    assert not manager.can_reserve((), 3)
    manager.reserve("sequence:2", (), 2)
    assert len(manager.match(A)) == 1
    assert manager.holders()[manager.match(A)[0]] == ("lease:1",)
    manager.check()
