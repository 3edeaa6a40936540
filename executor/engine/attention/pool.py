"""The KV pool: one contiguous tensor, block-major, and how to address it by rows.

`[num_blocks, layers, 2, kv_heads, tokens_per_block, head_dim]`, so that a block
is one contiguous piece for the data plane. Two flat views serve the engine:
`slots` has a row of head_dim for every (block, layer, k/v, head, token) and is
written to; `pieces` has a row of tokens_per_block * head_dim for every (block,
layer, k/v, head) and is gathered from. Both are plain row gathers, which torch
does at the speed of memory; indexing the six-dimensional tensor is far slower.
"""

from __future__ import annotations

import torch

from executor.engine.attention.pages import release_pages
from protos.errors import RequestFailedError
from protos.messages import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvPool:
    def __init__(self, num_blocks: int, layout: KvLayout, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tokens_per_block = layout.tokens_per_block
        self.num_kv_heads = layout.num_kv_heads
        self.head_dim = layout.head_dim
        # Zeros: a stray NaN in memory never written would survive masking.
        self.tensor = torch.zeros(
            num_blocks,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.tokens_per_block,
            layout.head_dim,
            dtype=TORCH_DTYPES[layout.dtype],
            device=device,
        )
        self.slots = self.tensor.view(-1, layout.head_dim)
        self.pieces = self.tensor.view(-1, layout.tokens_per_block * layout.head_dim)
        self.pieces_per_layer = 2 * layout.num_kv_heads
        self.pieces_per_block = layout.num_layers * self.pieces_per_layer

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def slot_rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows of `slots` for layer 0: [2, tokens, kv_heads]; add `slot_step * layer`."""
        heads = torch.arange(self.pieces_per_layer, device=blocks.device)
        pieces = blocks[None, :, None] * self.pieces_per_block + heads.view(2, 1, self.num_kv_heads)
        return pieces * self.tokens_per_block + offsets[None, :, None]

    def piece_rows(self, block_table: torch.Tensor) -> torch.Tensor:
        """Rows of `pieces` for layer 0: [2, sequences, kv_heads, blocks]; add `piece_step * layer`.

        `block_table` is [sequences, blocks].
        """
        heads = torch.arange(self.pieces_per_layer, device=block_table.device)
        return block_table[None, :, None, :] * self.pieces_per_block + heads.view(
            2, 1, self.num_kv_heads, 1
        )

    @property
    def piece_step(self) -> int:
        return self.pieces_per_layer

    @property
    def slot_step(self) -> int:
        return self.pieces_per_layer * self.tokens_per_block

    def zero(self, block_ids: list[int]) -> None:
        """Blank blocks about to be begun, so that their unwritten tail is finite."""
        for block_id in block_ids:
            self.tensor[block_id].zero_()

    def release_pages(self) -> None:
        """Give the memory back, on a CPU; the address stays, and all reads as zeros.

        Raises RequestFailedError.
        """
        assert self.device.type == "cpu", self.device
        try:
            release_pages(self.address, self.tensor.nbytes)
        except OSError as error:
            raise RequestFailedError(f"the KV pool's memory was not given back: {error}") from error
