"""From logits to token ids: greedy, temperature, top-k, top-p.

Random numbers are counter-based: what a token's noise is depends on the
request's seed, the position in the whole sequence and the token's id, on nothing
else. So a request draws the same tokens whatever the batch, the chunking or the
server, and can be resumed elsewhere.

A token is drawn by the Gumbel-max method (Gumbel, 1954; Yellott, 1977): the
largest of logit / temperature + noise, which has exactly the softmax's
distribution. Unlike a walk along the cumulative distribution, where float32
noise in any logit moves every border behind it, it changes an answer only where
the two best sums are that close.

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


def gumbel_noise(
    seeds: list[int], positions: list[int], vocab_size: int
) -> npt.NDArray[np.float64]:
    """[B, V]: standard Gumbel numbers, one per (seed, position, token id).

    (seed, position) is hashed to the state of a SplitMix64 generator (Steele,
    Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), whose
    n-th output belongs to token n.
    """
    seed_b = np.asarray([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    position_b = np.asarray(positions, dtype=np.uint64)
    state_b = _mix(_mix(seed_b + _GAMMA) ^ (position_b * _GAMMA))
    step_v = np.arange(1, vocab_size + 1, dtype=np.uint64) * _GAMMA
    bits_bv = _mix(state_b[:, None] + step_v[None])
    # Never 0 nor 1: both logarithms stay finite.
    uniform_bv = ((bits_bv >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform_bv))
    return noise


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
    temperature_b1 = _column([row.temperature for row in rows], device)
    sorted_bv, ids_bv = torch.sort(logits_bv.double(), dim=-1, descending=True, stable=True)
    # The largest is subtracted first: a tiny temperature must not overflow.
    scaled_bv = (sorted_bv - sorted_bv[:, :1]) / temperature_b1
    weights_bv = scaled_bv.exp()
    vocab_size = logits_bv.shape[1]
    top_k_b1 = _column([float(row.top_k or vocab_size) for row in rows], device)
    rank_v = torch.arange(vocab_size, device=device, dtype=torch.float64)
    weights_bv = weights_bv.masked_fill(rank_v[None] >= top_k_b1, 0.0)
    probabilities_bv = weights_bv / weights_bv.sum(dim=-1, keepdim=True)
    before_bv = probabilities_bv.cumsum(dim=-1) - probabilities_bv
    top_p_b1 = _column([row.top_p for row in rows], device)
    is_cut_bv = (before_bv >= top_p_b1) & (rank_v[None] > 0)
    kept_bv = probabilities_bv.masked_fill(is_cut_bv, 0.0)
    return torch.zeros_like(kept_bv).scatter_(1, ids_bv, kept_bv)


def _draw(logits_bv: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    temperature_b1 = _column([row.temperature for row in rows], logits_bv.device)
    wide_bv = logits_bv.double()
    # The largest is subtracted first: a tiny temperature must not overflow.
    scores_bv = (wide_bv - wide_bv.amax(dim=-1, keepdim=True)) / temperature_b1
    cut = [index for index, row in enumerate(rows) if row.top_k or row.top_p < 1.0]
    if cut:
        kept_bv = kept_probabilities(logits_bv[cut], [rows[index] for index in cut]) > 0
        scores_bv[cut] = scores_bv[cut].masked_fill(~kept_bv, float("-inf"))
    seeds, positions = [row.seed for row in rows], [row.position for row in rows]
    noise_bv = torch.from_numpy(gumbel_noise(seeds, positions, logits_bv.shape[1]))
    picked: list[int] = (scores_bv + noise_bv.to(logits_bv.device)).argmax(dim=-1).tolist()
    return picked


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
