"""What a pull must satisfy before its first frame leaves: refused by name otherwise.

The pool here and the pool there must have one layout in this release; the first
field that differs is named.
"""

from __future__ import annotations

import msgspec

from kv_transfer.events import PoolMemory, Pull, TransferLimits
from kv_transfer.frames import MAX_POSITIONS, MAX_SEGMENTS
from protos.errors import ErrorData, KvTransferError
from protos.messages import KvLayout


def what_is_wrong(pull: Pull, pool: PoolMemory, limits: TransferLimits) -> ErrorData | None:
    """The error to fail the pull with, or None."""
    assert len(pull.block_ids) == len(pull.positions), pull.disagg_request_id
    assert all(0 <= block < pool.num_blocks for block in pull.block_ids), pull.disagg_request_id
    error = _layout_error(pull.source_layout, pool.layout) or _size_error(pull, pool, limits)
    return error.to_data() if error else None


def _layout_error(theirs: KvLayout, ours: KvLayout) -> KvTransferError | None:
    for name in msgspec.structs.fields(KvLayout):
        field = name.name
        there, here = getattr(theirs, field), getattr(ours, field)
        if there != here:
            return KvTransferError(
                f"the source's KV layout differs in {field}: {there!r} there, {here!r} here",
                field=f"layout.{field}",
                value=there,
                limit=here,
            )
    return None


def _size_error(pull: Pull, pool: PoolMemory, limits: TransferLimits) -> KvTransferError | None:
    outside = [p for p in pull.positions if not 0 <= p < pull.num_source_blocks]
    if outside:
        return KvTransferError(
            f"position {outside[0]} is not one of the {pull.num_source_blocks} offered blocks",
            field="positions",
            value=outside[0],
            limit=pull.num_source_blocks - 1,
        )
    blocks_per_segment = max(1, limits.segment_bytes_max // pool.layout.block_bytes)
    blocks_max = min(MAX_POSITIONS - 1024, blocks_per_segment * (MAX_SEGMENTS // 2))
    if max(len(pull.positions), pull.num_source_blocks) > blocks_max:
        return KvTransferError(
            f"{len(pull.positions)} of {pull.num_source_blocks} blocks are too many for one pull",
            field="positions",
            value=len(pull.positions),
            limit=blocks_max,
        )
    if not 1 <= len(pull.pull_token) <= 64:
        return KvTransferError(
            "the pull token has a length that no source mints",
            field="pull_token",
            value=len(pull.pull_token),
            limit="1 to 64 bytes",
        )
    return None
