"""The block manager against a naive model, under any order of calls."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.engine.control_seam import KvCleared, KvRemoved, KvStored
from executor.engine.kv_cache import BlockManager

NUM_BLOCKS = 10
CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def chain_hashes(chain: list[int]) -> list[bytes]:
    return [repr(chain[: index + 1]).encode() for index in range(len(chain))]


class BlockManagerMachine(RuleBasedStateMachine):
    """The model keeps lists only: who holds what, what is indexed, what idles since when."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, 4)
        self.numbers = itertools.count()
        self.holds: dict[str, list[int]] = {}
        self.to_write: dict[str, list[tuple[int, bytes]]] = {}
        self.indexed: dict[bytes, int] = {}
        self.idle: list[int] = []
        self.manager.log.listen(True)
        self.told: set[bytes] = set()
        """What a listener to the events believes to be stored."""

    def held(self) -> set[int]:
        return {block for blocks in self.holds.values() for block in blocks}

    def expected_match(self, hashes: list[bytes]) -> list[int]:
        known = itertools.takewhile(lambda block_hash: block_hash in self.indexed, hashes)
        return [self.indexed[block_hash] for block_hash in known]

    @rule(chain=CHAINS, num_more=st.integers(0, 3), by_transfer=st.booleans())
    def reserve(self, chain: list[int], num_more: int, by_transfer: bool) -> None:
        hashes = chain_hashes(chain)
        matched = self.manager.match(hashes)
        assert list(matched) == self.expected_match(hashes)
        num_new = len(hashes) - len(matched) + num_more
        num_taken = len(self.held() | set(matched))
        fits = num_taken + num_new <= NUM_BLOCKS
        assert self.manager.can_reserve(matched, num_new) == fits
        if not fits:
            return
        number = next(self.numbers)
        holder, writer = f"sequence:{number}", f"transfer:{number}" if by_transfer else None
        num_blank = NUM_BLOCKS - len(self.held()) - len(self.idle)
        for block in matched:
            if block in self.idle:
                self.idle.remove(block)
        evicted = self.idle[: max(0, num_new - num_blank)]
        blocks = self.manager.reserve(holder, matched, num_new, writer)
        fresh = list(blocks[len(matched) :])
        assert len(set(blocks)) == len(blocks)
        assert not set(fresh) & self.held()
        assert set(self.idle) & set(fresh) == set(evicted), "the least recently used go first"
        self.idle = self.idle[len(evicted) :]
        self.indexed = {h: block for h, block in self.indexed.items() if block not in evicted}
        self.holds[holder] = list(blocks)
        if writer and fresh:
            self.holds[writer] = fresh
        self.to_write[writer or holder] = list(zip(fresh, hashes[len(matched) :], strict=False))

    @precondition(lambda self: any(self.to_write.values()))
    @rule(pick=st.integers(0, 99), seals=st.booleans())
    def write(self, pick: int, seals: bool) -> None:
        writers = [name for name, blocks in self.to_write.items() if blocks]
        writer = writers[pick % len(writers)]
        block, block_hash = self.to_write[writer][0]
        if not seals:
            self.manager.fill(writer, block)
            return
        self.manager.seal(writer, block, block_hash)
        self.to_write[writer].pop(0)
        self.indexed.setdefault(block_hash, block)

    @precondition(lambda self: self.holds)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        holder = list(self.holds)[pick % len(self.holds)]
        blocks = self.holds.pop(holder)
        self.to_write.pop(holder, None)
        assert self.manager.release(holder) == len(blocks)
        let_go = [block for block in reversed(blocks) if block not in self.held()]
        self.idle += [block for block in let_go if block in self.indexed.values()]

    @precondition(lambda self: self.indexed)
    @rule(pick=st.integers(0, 99))
    def lease(self, pick: int) -> None:
        """A lease pins one reusable block, idle or not."""
        block = list(self.indexed.values())[pick % len(self.indexed)]
        holder = f"lease:{next(self.numbers)}"
        self.manager.hold(holder, block)
        self.holds[holder] = [block]
        if block in self.idle:
            self.idle.remove(block)

    @rule()
    def forget(self) -> None:
        assert self.manager.forget_cached() == len(self.idle)
        self.indexed = {h: block for h, block in self.indexed.items() if block not in self.idle}
        self.idle = []

    @invariant()
    def a_listener_knows_what_is_indexed(self) -> None:
        for event in self.manager.log.take():
            match event:
                case KvStored():
                    assert not self.told & set(event.block_hashes), "stored twice"
                    self.told |= set(event.block_hashes)
                case KvRemoved():
                    assert set(event.block_hashes) <= self.told, "removed, never stored"
                    self.told -= set(event.block_hashes)
                case KvCleared():
                    self.told = set()
        assert self.told == set(self.indexed) == set(self.manager.snapshot().block_hashes)

    @invariant()
    def agrees(self) -> None:
        self.manager.check()
        assert self.manager.num_free == NUM_BLOCKS - len(self.held())
        assert self.manager.blocks_by_state()["cached"] == len(self.idle)
        for kind in ("sequence", "lease", "transfer"):
            blocks = {b for name, held in self.holds.items() if name.startswith(kind) for b in held}
            assert self.manager.num_held_by_kind(kind) == len(blocks)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
