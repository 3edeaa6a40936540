"""Runs one step's chunks through the model and samples: the engine's only door to torch."""

from __future__ import annotations

import torch

from executor.engine.attention.paged import Span, plan_attention
from executor.engine.attention.pool import KvPool
from executor.engine.models.llama import LlamaModel
from executor.engine.sampler import SamplingRow, sample
from executor.engine.scheduler import Chunk
from executor.engine.sequence import Sequence


class TorchRunner:
    """Owns the model and the pool. One thread, no state between steps but the pool."""

    def __init__(self, model: LlamaModel, pool: KvPool) -> None:
        self.model = model
        self.pool = pool

    @property
    def progress(self) -> int:
        return self.model.num_layers_run

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> list[int | None]:
        """For each chunk the token sampled after it, None where it ends inside the known ones.

        BAD_TOKEN_ID where the model's answer is not finite.
        """
        # Single tokens go first: they are attended to as one batch.
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
        ordered = [chunks[index] for index in order]
        tokens = [
            token
            for chunk in ordered
            for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
        ]
        self.pool.zero([block for chunk in ordered for block in self._begun_blocks(chunk)])
        spans = [Span(c.start, c.num_tokens, c.sequence.block_ids) for c in ordered]
        plan = plan_attention(self.pool, spans, self.model.config.sliding_window)
        ends = torch.tensor([chunk.num_tokens for chunk in ordered]).cumsum(0) - 1
        logit_rows = ends[torch.tensor([chunk.samples for chunk in ordered])]
        device = self.pool.device
        logits = self.model.forward(
            torch.tensor(tokens, device=device), plan, logit_rows.to(device)
        )
        sampled = iter(sample(logits, [_row(c.sequence) for c in ordered if c.samples]))
        result: list[int | None] = [None] * len(chunks)
        for index, chunk in zip(order, ordered, strict=True):
            result[index] = next(sampled) if chunk.samples else None
        return result

    def _begun_blocks(self, chunk: Chunk) -> list[int]:
        """The block that this chunk begins and leaves part of unwritten."""
        tokens_per_block = self.pool.tokens_per_block
        end = chunk.start + chunk.num_tokens
        last = end // tokens_per_block
        is_begun_here = end % tokens_per_block and last * tokens_per_block >= chunk.start
        return [chunk.sequence.block_ids[last]] if is_begun_here else []


def _row(sequence: Sequence) -> SamplingRow:
    sampling = sequence.request.sampling
    return SamplingRow(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed or 0,
        position=len(sequence.tokens),
    )
