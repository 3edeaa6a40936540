"""Runs one step's chunks through the model and samples: the engine's only door to torch.

The model can be given back and had again (`release`, `restore`), the pool's
memory with it; the pool's address, which the data plane has registered, stays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.engine.answers import not_finite
from executor.engine.attention.paged import Span, plan_attention
from executor.engine.attention.pages import trim_heap
from executor.engine.attention.pool import KvPool
from executor.engine.models.llama import LlamaModel, Progress
from executor.engine.processing import apply_processors
from executor.engine.runner_seam import ChunkResult
from executor.engine.sampler import BAD_TOKEN_ID, SamplingRow, sample
from executor.engine.scheduler import Chunk
from executor.engine.sequence import Sequence
from protos.errors import BatonError, UnsupportedError


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of a step's logits are a chunk's: its prompt tokens', its sampled one's."""

    context: slice
    sampled: int | None


class TorchRunner:
    """Owns the model and the pool. One thread, no state between steps but the pool.

    `load` makes the model again from its files, counting in `progress`; without a
    model the runner begins asleep.
    """

    def __init__(
        self,
        model: LlamaModel | None,
        pool: KvPool,
        *,
        load: Callable[[], LlamaModel],
        progress: Progress,
        pins_pool: str = "",
    ) -> None:
        self._model = model
        self.pool = pool
        self._load = load
        self._progress = progress
        self._pins_pool = pins_pool
        """Why the pool's memory cannot be given back: who has pinned it; empty: nobody."""

    @property
    def progress(self) -> int:
        return self._progress.count

    @property
    def model(self) -> LlamaModel:
        assert self._model is not None, "the engine is asleep"
        return self._model

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> list[ChunkResult]:
        # Single tokens go first: they are attended to as one batch.
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
        ordered = [chunks[index] for index in order]
        logits_bv, rows = self._logits(ordered)
        results = iter(_results(ordered, rows, logits_bv))
        by_index = dict(zip(order, results, strict=True))
        return [by_index[index] for index in range(len(chunks))]

    def _logits(self, ordered: list[Chunk]) -> tuple[torch.Tensor, list[_Rows]]:
        tokens = [
            token
            for chunk in ordered
            for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
        ]
        self.pool.zero([block for chunk in ordered for block in self._begun_blocks(chunk)])
        spans = [Span(c.start, c.num_tokens, c.sequence.block_ids) for c in ordered]
        plan = plan_attention(self.pool, spans, self.model.config.sliding_window)
        wanted, rows = _wanted_rows(ordered)
        device = self.pool.device
        logits_bv = self.model.forward(
            torch.tensor(tokens, device=device),
            plan,
            torch.tensor(wanted, dtype=torch.long, device=device),
        )
        return logits_bv, rows

    def _begun_blocks(self, chunk: Chunk) -> list[int]:
        """The block that this chunk begins and leaves part of unwritten."""
        tokens_per_block = self.pool.tokens_per_block
        end = chunk.start + chunk.num_tokens
        last = end // tokens_per_block
        is_begun_here = end % tokens_per_block and last * tokens_per_block >= chunk.start
        return [chunk.sequence.block_ids[last]] if is_begun_here else []

    # --- sleep --------------------------------------------------------------

    def check_release(self) -> None:
        if self.pool.device.type != "cpu":
            raise UnsupportedError(
                f"an engine on {self.pool.device} cannot sleep; one on a CPU can",
                field="device",
                value=self.pool.device,
                limit="cpu",
            )
        if self._pins_pool:
            raise UnsupportedError(
                f"the engine cannot sleep: {self._pins_pool}", field="transfer.ucx_tls"
            )

    def release(self) -> None:
        self.pool.release_pages()
        self._model = None
        gc.collect()
        trim_heap()

    def restore(self) -> None:
        self._model = self._load()


def _wanted_rows(ordered: list[Chunk]) -> tuple[list[int], list[_Rows]]:
    """The tokens of the step whose logits are wanted, and whose they are."""
    wanted: list[int] = []
    rows: list[_Rows] = []
    begin = 0
    for chunk in ordered:
        num_context = _num_context_rows(chunk)
        first = len(wanted)
        wanted += range(begin, begin + num_context)
        begin += chunk.num_tokens
        if chunk.samples and (not wanted or wanted[-1] != begin - 1):
            wanted.append(begin - 1)
        sampled = len(wanted) - 1 if chunk.samples else None
        rows.append(_Rows(slice(first, first + num_context), sampled))
    return wanted, rows


def _num_context_rows(chunk: Chunk) -> int:
    """Tokens of the prompt in this chunk, where the request wants their logits."""
    if not chunk.sequence.request.return_context_logits:
        return 0
    return max(0, min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt) - chunk.start)


def _results(ordered: list[Chunk], rows: list[_Rows], logits_bv: torch.Tensor) -> list[ChunkResult]:
    sampling = [(c.sequence, r.sampled) for c, r in zip(ordered, rows, strict=True)]
    sampled = [(sequence, row) for sequence, row in sampling if row is not None]
    sequences = [sequence for sequence, _ in sampled]
    has_processors = any(sequence.request.local is not None for sequence in sequences)
    # A copy, but for the common case: what processors change is not what is returned.
    is_plain = len(sampled) == len(logits_bv) and not has_processors
    chosen_from = logits_bv if is_plain else logits_bv[[row for _, row in sampled]]
    failed = iter(apply_processors(sequences, chosen_from))
    tokens = iter(sample(chosen_from, [_row(sequence) for sequence in sequences]))
    return [
        _result(
            chunk,
            its,
            logits_bv,
            next(tokens) if its.sampled is not None else None,
            next(failed) if its.sampled is not None else None,
        )
        for chunk, its in zip(ordered, rows, strict=True)
    ]


def _result(
    chunk: Chunk,
    rows: _Rows,
    logits_bv: torch.Tensor,
    token_id: int | None,
    error: BatonError | None,
) -> ChunkResult:
    if error is None and token_id == BAD_TOKEN_ID:
        error = not_finite()
    if error is not None:
        return ChunkResult(error=error)
    has_context = rows.context.stop > rows.context.start
    wants_generation = chunk.sequence.request.return_generation_logits
    is_returned = wants_generation and rows.sampled is not None
    own = slice(rows.sampled, (rows.sampled or 0) + 1)
    return ChunkResult(
        token_id,
        context_logits=logits_bv[rows.context].cpu().numpy() if has_context else None,
        # A copy: a view would keep the whole step's logits.
        generation_logits=logits_bv[own].cpu().numpy().copy() if is_returned else None,
    )


def _row(sequence: Sequence) -> SamplingRow:
    sampling = sequence.request.sampling
    return SamplingRow(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed or 0,
        position=len(sequence.tokens),
    )
