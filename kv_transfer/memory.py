"""Reads the pool by address: which pieces to move, and what their bytes add up to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import xxhash

from kv_transfer.events import PoolMemory
from kv_transfer.transport import Region


class BlockMemory:
    """The pool's blocks as regions. Runs of neighbouring blocks become one region."""

    def __init__(self, pool: PoolMemory) -> None:
        self.block_bytes = pool.layout.block_bytes
        self.num_blocks = pool.num_blocks
        self._base = pool.base_address
        whole = (ctypes.c_char * (pool.num_blocks * self.block_bytes)).from_address(self._base)
        self._view = memoryview(whole).cast("B")

    def regions(self, block_ids: Sequence[int]) -> list[Region]:
        """One region per run of consecutive ids, in the order given."""
        regions: list[Region] = []
        start = previous = -2
        length = 0
        for block in block_ids:
            if block == previous + 1:
                length += 1
            else:
                if length:
                    regions.append(self._region(start, length))
                start, length = block, 1
            previous = block
        if length:
            regions.append(self._region(start, length))
        return regions

    def checksum(self, regions: Iterable[Region]) -> int:
        """xxh3-64 of the bytes in the regions' order, however they are cut."""
        digest = xxhash.xxh3_64()
        for address, num_bytes in regions:
            offset = address - self._base
            digest.update(self._view[offset : offset + num_bytes])
        return digest.intdigest()

    def _region(self, start: int, num_blocks: int) -> Region:
        return self._base + start * self.block_bytes, num_blocks * self.block_bytes
