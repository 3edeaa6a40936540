"""The block manager: who holds which block of the KV pool, and what is reusable.

A block is in exactly one state:

    FREE ──reserve──> RESERVED ──fill──> LIVE ──last holder lets go──> CACHED
      ^                  │                 │   (sealed and indexed)      │
      └──────────────────┴─────────────────┘                             │
      ^   last holder lets go, nothing worth keeping                     │
      └──────────── evicted, least recently used first ──────────────────┘
                                  CACHED ──share──> LIVE

- Holders are names: `sequence:ID`, `lease:ID`, `transfer:ID`. A RESERVED or LIVE
  block has at least one, FREE and CACHED have none.
- At most one holder may write a block. `seal` ends writing for ever: the block
  is full and verified. Only sealed blocks enter the prefix index, so reserved or
  half-filled blocks never serve as prefix hits.
- `can_reserve` asks, `reserve` acts: all or nothing.

Pure: no torch here, block ids only. The order of eviction is deterministic.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from executor.engine.control_seam import KvSnapshot
from executor.engine.kv_events import KvEventLog


class BlockState(enum.StrEnum):
    FREE = "free"
    RESERVED = "reserved"
    LIVE = "live"
    CACHED = "cached"


@dataclass(slots=True)
class Block:
    state: BlockState = BlockState.FREE
    holders: dict[str, None] = field(default_factory=dict)
    """Names in order of arrival; a dict so that order is kept and lookup is cheap."""
    writer: str | None = None
    is_sealed: bool = False
    hash: bytes | None = None
    """Set where this block is the one that the prefix index names."""


def kind_of(holder: str) -> str:
    return holder.partition(":")[0]


class BlockManager:
    """See the module's docstring for the life of a block."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._held: dict[str, list[int]] = {}
        self._num_by_kind: Counter[str] = Counter()
        self.num_evicted = 0
        self.log = KvEventLog()
        """What the prefix index gains and loses."""

    # --- asking -------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that a reservation can have now: free ones and idle cached ones."""
        return len(self._free) + len(self._cached)

    def held_by(self, holder: str) -> tuple[int, ...]:
        return tuple(self._held.get(holder, ()))

    def num_held_by_kind(self, kind: str) -> int:
        """Distinct blocks with at least one holder of this kind."""
        return self._num_by_kind[kind]

    def match(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The longest run of indexed blocks from the chain's start."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._index.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return tuple(found)

    def can_reserve(self, matched: Sequence[int], num_new: int) -> bool:
        """Whether `matched` can be shared and `num_new` more blocks reserved beside them."""
        num_idle = sum(1 for block_id in matched if block_id in self._cached)
        return num_new <= self.num_free - num_idle

    # --- acting -------------------------------------------------------------

    def reserve(
        self, holder: str, matched: Sequence[int], num_new: int, writer: str | None = None
    ) -> tuple[int, ...]:
        """Share `matched`, then take `num_new` blocks that `writer` (or the holder) may write.

        A writer that is not the holder becomes a second holder of the new blocks.
        """
        assert self.can_reserve(matched, num_new), "reserve without can_reserve"
        for block_id in matched:
            self.hold(holder, block_id)
        fresh = tuple(self._take() for _ in range(num_new))
        for block_id in fresh:
            block = self._blocks[block_id]
            block.state = BlockState.RESERVED
            block.writer = writer or holder
            self._add_holder(holder, block_id)
            if writer is not None and writer != holder:
                self._add_holder(writer, block_id)
        return (*matched, *fresh)

    def hold(self, holder: str, block_id: int) -> None:
        """Add a holder to a block that has content."""
        block = self._blocks[block_id]
        assert block.state in (BlockState.LIVE, BlockState.CACHED), (holder, block_id, block)
        if block.state is BlockState.CACHED:
            del self._cached[block_id]
            block.state = BlockState.LIVE
        self._add_holder(holder, block_id)

    def fill(self, writer: str, block_id: int) -> None:
        """Content has been written; idempotent while this writer fills it further."""
        block = self._blocks[block_id]
        assert block.writer == writer, (writer, block_id, block)
        block.state = BlockState.LIVE

    def seal(self, writer: str, block_id: int, block_hash: bytes, parent_hash: bytes = b"") -> None:
        """The block is full and verified: written by nobody from now on, and reusable.

        `parent_hash` is the block's before it, or the chain's root: told to listeners.
        Where another block already holds the same content, that one stays the
        indexed one and this block is dropped when its holders let go.
        """
        block = self._blocks[block_id]
        assert block.writer == writer, (writer, block_id, block)
        block.state = BlockState.LIVE
        block.writer = None
        block.is_sealed = True
        if block_hash not in self._index:
            self._index[block_hash] = block_id
            block.hash = block_hash
            self.log.stored(block_hash, parent_hash, self.tokens_per_block)

    def pass_writer(self, writer: str, block_id: int, successor: str) -> None:
        """Another holder goes on writing this block (a pulled, partial last block)."""
        block = self._blocks[block_id]
        assert block.writer == writer, (writer, block_id, block)
        assert successor in block.holders, (successor, block_id, block)
        block.writer = successor

    def release(self, holder: str) -> int:
        """This holder lets go of everything; returns how many blocks that were.

        Last blocks first, so that a prompt's head outlives its tail in the cache.
        """
        held = self._held.pop(holder, [])
        for block_id in reversed(held):
            self._drop_holder(holder, block_id)
        return len(held)

    def forget_cached(self) -> int:
        """Free every idle cached block."""
        num_cached = len(self._cached)
        is_all = num_cached == len(self._index)
        while self._cached:
            self._free.append(self._evict(is_told=not is_all))
        if is_all:
            self.log.cleared()
        return num_cached

    # --- inside -------------------------------------------------------------

    def _take(self) -> int:
        return self._free.popleft() if self._free else self._evict()

    def _evict(self, *, is_told: bool = True) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block = self._blocks[block_id]
        assert block.hash is not None, (block_id, block)
        del self._index[block.hash]
        if is_told:
            self.log.removed(block.hash)
        self._blocks[block_id] = Block()
        self.num_evicted += 1
        return block_id

    def _add_holder(self, holder: str, block_id: int) -> None:
        block = self._blocks[block_id]
        assert holder not in block.holders, (holder, block_id, block)
        kind = kind_of(holder)
        if all(kind_of(other) != kind for other in block.holders):
            self._num_by_kind[kind] += 1
        block.holders[holder] = None
        self._held.setdefault(holder, []).append(block_id)

    def _drop_holder(self, holder: str, block_id: int) -> None:
        block = self._blocks[block_id]
        del block.holders[holder]
        kind = kind_of(holder)
        if all(kind_of(other) != kind for other in block.holders):
            self._num_by_kind[kind] -= 1
        if block.writer == holder:
            block.writer = None
        if not block.holders:
            self._retire(block_id, block)

    def _retire(self, block_id: int, block: Block) -> None:
        if block.hash is not None:
            block.state = BlockState.CACHED
            self._cached[block_id] = None
        else:
            self._blocks[block_id] = Block()
            self._free.append(block_id)

    def snapshot(self) -> KvSnapshot:
        """What the prefix index has now, in the order in which it came."""
        return KvSnapshot(
            sequence=self.log.told(),
            block_hashes=tuple(self._index),
            tokens_per_block=self.tokens_per_block,
        )

    # --- auditing -----------------------------------------------------------

    def blocks_by_state(self) -> dict[str, int]:
        counts = Counter(block.state.value for block in self._blocks)
        return {state.value: counts[state.value] for state in BlockState}

    def blocks_by_owner(self) -> dict[str, int]:
        return {kind: self._num_by_kind[kind] for kind in sorted(self._num_by_kind)}

    def holders(self) -> dict[int, tuple[str, ...]]:
        return {
            block_id: tuple(block.holders)
            for block_id, block in enumerate(self._blocks)
            if block.holders
        }

    def holder_names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def check(self) -> None:
        """Raises AssertionError for the first thing that is not as the docstring says."""
        for block_id, block in enumerate(self._blocks):
            _check_block(block_id, block)
        self._check_lists()
        self._check_holders()

    def _check_lists(self) -> None:
        by_state: dict[BlockState, list[int]] = {state: [] for state in BlockState}
        for block_id, block in enumerate(self._blocks):
            by_state[block.state].append(block_id)
        assert sorted(self._free) == by_state[BlockState.FREE], "the free list is wrong"
        assert sorted(self._cached) == by_state[BlockState.CACHED], "the cached list is wrong"
        for block_hash, block_id in self._index.items():
            assert self._blocks[block_id].hash == block_hash, (block_id, "indexed wrongly")
        num_hashed = sum(1 for block in self._blocks if block.hash is not None)
        assert num_hashed == len(self._index), "a block's hash is missing from the index"

    def _check_holders(self) -> None:
        seen = _holders_by_block(self._held)
        kinds: Counter[str] = Counter()
        for block_id, block in enumerate(self._blocks):
            assert sorted(block.holders) == sorted(seen.get(block_id, [])), (block_id, block)
            kinds.update({kind_of(holder) for holder in block.holders})
        assert kinds == +self._num_by_kind, "the counts by kind are wrong"


def _check_block(block_id: int, block: Block) -> None:
    is_held = block.state in (BlockState.RESERVED, BlockState.LIVE)
    story = (block_id, block)
    assert bool(block.holders) == is_held, (*story, "holders do not fit the state")
    assert block.writer is None or block.writer in block.holders, (*story, "unknown writer")
    assert not (block.is_sealed and block.writer), (*story, "a sealed block has a writer")
    assert block.hash is None or block.is_sealed, (*story, "indexed but not verified")
    assert block.state is not BlockState.CACHED or block.hash is not None, (*story, "no hash")
    assert block.state is not BlockState.RESERVED or not block.is_sealed, (*story, "sealed")
    assert block.state is not BlockState.FREE or block == Block(), (*story, "free but not blank")


def _holders_by_block(held: dict[str, list[int]]) -> dict[int, list[str]]:
    seen: dict[int, list[str]] = {}
    for holder, block_ids in held.items():
        for block_id in block_ids:
            seen.setdefault(block_id, []).append(holder)
    return seen


def num_blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold this many tokens, the last one perhaps in part."""
    return -(-num_tokens // tokens_per_block)
