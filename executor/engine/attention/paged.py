"""Attention of one step over the paged pool.

A step's tokens lie flat: first one token of every decoding sequence, then the
prefill chunks one after the other. `plan_attention` turns block ids into tensors
once a step; `attend` runs once a layer. It writes the new keys and values into
their slots, then attends from the pool, so a chunk sees its past and itself.

- Decode: the blocks of all sequences are gathered into one padded batch; query
  heads that share a KV head become the rows of one query, so nothing is repeated
  (30 times faster on a CPU than repeating keys and values).
- Prefill: sequence by sequence, with a causal mask aligned to the end.

Shapes: T tokens, B decoding sequences, S keys (padded), M blocks, H query heads,
K KV heads, G = H / K, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from executor.engine.attention.pool import KvPool


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step."""

    start: int
    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Gather:
    """Rows of the pool and the mask for queries that attend to them."""

    rows: torch.Tensor
    shape: tuple[int, ...]
    num_keys: int
    mask: torch.Tensor | None
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`decode` covers the first `num_decode` tokens, `prefills` (begin, end, gather) the rest."""

    pool: KvPool
    positions: torch.Tensor
    slot_rows: torch.Tensor
    num_decode: int
    decode: _Gather | None
    prefills: tuple[tuple[int, int, _Gather], ...]


def plan_attention(pool: KvPool, spans: list[Span], sliding_window: int | None) -> AttentionPlan:
    """`spans` in batch order: those with one token first."""
    num_decode = sum(1 for span in spans if span.num_tokens == 1)
    assert all(span.num_tokens == 1 for span in spans[:num_decode]), "single tokens come first"
    positions = torch.cat([torch.arange(s.start, s.start + s.num_tokens) for s in spans])
    blocks = torch.cat([_blocks_of(pool, span) for span in spans])
    begin, prefills = num_decode, []
    for span in spans[num_decode:]:
        prefills.append((begin, begin + span.num_tokens, _gather_one(pool, span, sliding_window)))
        begin += span.num_tokens
    return AttentionPlan(
        pool=pool,
        positions=positions.to(pool.device),
        slot_rows=pool.slot_rows(blocks, positions % pool.tokens_per_block)
        .flatten()
        .to(pool.device),
        num_decode=num_decode,
        decode=_gather_batch(pool, spans[:num_decode], sliding_window) if num_decode else None,
        prefills=tuple(prefills),
    )


def _blocks_of(pool: KvPool, span: Span) -> torch.Tensor:
    indexes = torch.arange(span.start, span.start + span.num_tokens) // pool.tokens_per_block
    return torch.tensor(span.block_ids)[indexes]


def _num_blocks(pool: KvPool, span: Span) -> int:
    return -(-(span.start + span.num_tokens) // pool.tokens_per_block)


def _gather_batch(pool: KvPool, spans: list[Span], window: int | None) -> _Gather:
    """All decoding sequences, padded with a block of their own, which the mask hides."""
    num_blocks_max = max(_num_blocks(pool, span) for span in spans)
    table = [
        [*ids, *([span.block_ids[0]] * (num_blocks_max - len(ids)))]
        for span in spans
        for ids in (span.block_ids[: _num_blocks(pool, span)],)
    ]
    lengths = torch.tensor([span.start + 1 for span in spans])
    num_keys = int(lengths.max())
    keys = torch.arange(num_keys)[None]
    is_visible = keys < lengths[:, None]
    if window is not None:
        is_visible &= keys >= lengths[:, None] - window
    return _Gather(
        rows=pool.piece_rows(torch.tensor(table)).flatten().to(pool.device),
        shape=_shape(pool, len(spans), num_blocks_max),
        num_keys=num_keys,
        mask=None if bool(is_visible.all()) else _additive(pool, is_visible)[:, None, None],
    )


def _gather_one(pool: KvPool, span: Span, window: int | None) -> _Gather:
    num_blocks, num_keys = _num_blocks(pool, span), span.start + span.num_tokens
    table = torch.tensor([span.block_ids[:num_blocks]])
    needs_window = window is not None and num_keys > window
    is_causal = span.start == 0 and not needs_window
    return _Gather(
        rows=pool.piece_rows(table).flatten().to(pool.device),
        shape=_shape(pool, 1, num_blocks),
        num_keys=num_keys,
        mask=None if is_causal else _additive(pool, _causal(span, window)),
        is_causal=is_causal,
    )


def _causal(span: Span, window: int | None) -> torch.Tensor:
    """[T, S]: which keys each of the span's queries may see."""
    queries = torch.arange(span.start, span.start + span.num_tokens)[:, None]
    keys = torch.arange(span.start + span.num_tokens)[None]
    is_visible = keys <= queries
    return is_visible if window is None else is_visible & (keys > queries - window)


def _shape(pool: KvPool, num_sequences: int, num_blocks: int) -> tuple[int, ...]:
    num_slots = num_blocks * pool.tokens_per_block
    return (2, num_sequences, pool.num_kv_heads, num_slots, pool.head_dim)


def _additive(pool: KvPool, is_visible: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(is_visible.shape, dtype=pool.tensor.dtype)
    return mask.masked_fill_(~is_visible, float("-inf")).to(pool.device)


def attend(
    plan: AttentionPlan, layer: int, q_thd: torch.Tensor, k_tkd: torch.Tensor, v_tkd: torch.Tensor
) -> torch.Tensor:
    """Write this layer's keys and values, attend, return [T, H * D]."""
    pool = plan.pool
    kv = torch.stack((k_tkd, v_tkd)).view(-1, pool.head_dim)
    pool.slots.index_copy_(0, plan.slot_rows + layer * pool.slot_step, kv)
    parts = []
    if plan.decode is not None:
        parts.append(_decode(pool, plan.decode, layer, q_thd[: plan.num_decode]))
    for begin, end, gather in plan.prefills:
        parts.append(_prefill(pool, gather, layer, q_thd[begin:end]))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.flatten(1)


def _gathered(pool: KvPool, gather: _Gather, layer: int) -> torch.Tensor:
    """[2, B, K, S, D]: keys and values in token order."""
    pieces = pool.pieces.index_select(0, gather.rows + layer * pool.piece_step)
    return pieces.view(gather.shape)[:, :, :, : gather.num_keys]


def _decode(pool: KvPool, gather: _Gather, layer: int, q_bhd: torch.Tensor) -> torch.Tensor:
    k_bksd, v_bksd = _gathered(pool, gather, layer)
    num_sequences, num_heads, head_dim = q_bhd.shape
    q_bkgd = q_bhd.reshape(num_sequences, pool.num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(q_bkgd, k_bksd, v_bksd, attn_mask=gather.mask)
    return out.reshape(num_sequences, num_heads, head_dim)


def _prefill(pool: KvPool, gather: _Gather, layer: int, q_thd: torch.Tensor) -> torch.Tensor:
    k_1ksd, v_1ksd = _gathered(pool, gather, layer)
    out = F.scaled_dot_product_attention(
        q_thd.transpose(0, 1)[None],
        k_1ksd,
        v_1ksd,
        attn_mask=gather.mask,
        is_causal=gather.is_causal,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
