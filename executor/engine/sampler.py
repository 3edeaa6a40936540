"""From logits to token ids: greedy, temperature, top-k, top-p.

Random numbers are counter-based: the uniform number that chooses a token
depends on the request's seed and the token's position in the whole sequence,
on nothing else. Whatever the batch, the chunking or the server, a request draws
the same numbers, so it can be resumed elsewhere. The token is the inverse of
the cumulative distribution at that number, in float64 and in the order of token
ids: an order by probability would let float32 noise between two almost equally
likely tokens swap them, and with them the answer.

Shapes: B rows (sequences), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BAD_TOKEN_ID = -1
"""Stands for a row whose logits are not finite."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to choose one row's token. `position` counts from the prompt's first token."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int


def uniforms(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position).

    Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014), the position mixed in before the
    second, so that neighbouring seeds and positions are unrelated.
    """
    seed_b = np.asarray([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    position_b = np.asarray(positions, dtype=np.uint64)
    bits_b = _mix(_mix(seed_b + _GAMMA) ^ (position_b * _GAMMA))
    return (bits_b >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sample(logits_bv: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """One token id a row; BAD_TOKEN_ID where the row is not finite."""
    best_b = logits_bv.argmax(dim=-1)
    # argmax takes NaN for the largest, so the best logit tells of any NaN in its row.
    top_b = logits_bv.gather(1, best_b[:, None])[:, 0]
    is_finite = torch.isfinite(top_b).tolist()
    chosen: list[int] = best_b.tolist()
    drawn = [index for index, row in enumerate(rows) if row.temperature > 0 and is_finite[index]]
    if drawn:
        picks = _draw(logits_bv[drawn], [rows[index] for index in drawn])
        for index, token_id in zip(drawn, picks, strict=True):
            chosen[index] = token_id
    return [
        token_id if finite else BAD_TOKEN_ID
        for token_id, finite in zip(chosen, is_finite, strict=True)
    ]


def kept_probabilities(logits_bv: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Probabilities by token id, 0 where top-k or top-p cut; not normalised after the cut.

    top-k keeps the k most likely, ties going to the smaller id. top-p keeps the
    smallest set of most likely tokens that reaches p, so at least one; it is
    measured after top-k.
    """
    device = logits_bv.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature_b1 = column([row.temperature for row in rows])
    sorted_bv, ids_bv = torch.sort(logits_bv.double(), dim=-1, descending=True, stable=True)
    # The largest is subtracted first: a tiny temperature must not overflow.
    scaled_bv = (sorted_bv - sorted_bv[:, :1]) / temperature_b1
    weights_bv = scaled_bv.exp()
    vocab_size = logits_bv.shape[1]
    top_k_b1 = column([float(row.top_k or vocab_size) for row in rows])
    rank_v = torch.arange(vocab_size, device=device, dtype=torch.float64)
    weights_bv = weights_bv.masked_fill(rank_v[None] >= top_k_b1, 0.0)
    probabilities_bv = weights_bv / weights_bv.sum(dim=-1, keepdim=True)
    before_bv = probabilities_bv.cumsum(dim=-1) - probabilities_bv
    top_p_b1 = column([row.top_p for row in rows])
    is_cut_bv = (before_bv >= top_p_b1) & (rank_v[None] > 0)
    kept_bv = probabilities_bv.masked_fill(is_cut_bv, 0.0)
    return torch.zeros_like(kept_bv).scatter_(1, ids_bv, kept_bv)


def _draw(logits_bv: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    kept_bv = kept_probabilities(logits_bv, rows)
    cumulative_bv = kept_bv.cumsum(dim=-1)
    u_b = uniforms([row.seed for row in rows], [row.position for row in rows])
    u_b1 = torch.from_numpy(u_b).to(logits_bv.device)[:, None]
    target_b1 = u_b1 * cumulative_bv[:, -1:]
    chosen_b1 = torch.searchsorted(cumulative_bv, target_b1, right=True)
    # Rounding may put the target on the very end; the last kept token is meant then.
    ids_v = torch.arange(kept_bv.shape[1], device=kept_bv.device)
    last_b1 = ids_v.masked_fill(kept_bv <= 0, -1).amax(dim=-1, keepdim=True)
    picked: list[int] = torch.minimum(chosen_b1, last_b1)[:, 0].tolist()
    return picked
