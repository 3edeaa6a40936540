"""The sampler: the right distribution, the right cuts, and the same draw whatever the batch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor.engine.sampler import (
    BAD_TOKEN_ID,
    SamplingRow,
    gumbel_noise,
    kept_probabilities,
    sample,
)

CHI_SQUARE_999 = {7: 24.32, 3: 16.27}
"""Critical values at p = 0.001 by degrees of freedom."""
PINNED = [
    "-0.081169032",
    "-0.265089647",
    "-0.781116163",
    "-0.956474849",
    "0.177206493",
    "0.483210518",
    "1.122345649",
    "2.165289732",
]


def row(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    position: int = 0,
) -> SamplingRow:
    return SamplingRow(temperature, top_k, top_p, seed, position)


def random_logits(num_rows: int, vocab_size: int = 64) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 2


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """Guards resuming elsewhere: row by row, together, and in another order draw the same."""
    logits = random_logits(6)
    rows = [
        row(0.0),
        row(0.8, seed=3, position=9),
        row(1.3, top_k=5, seed=3, position=10),
        row(0.7, top_p=0.6, seed=2**63, position=1),
        row(0.0, seed=3),
        row(1.0, top_k=7, top_p=0.9, seed=-1, position=8191),
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[[i]], [rows[i]])[0] for i in range(6)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])
    assert together[0] == int(logits[0].argmax())
    assert together[4] == int(logits[4].argmax())


def test_the_numbers_are_pinned() -> None:
    """Guards other releases: a changed generator would change every seeded answer."""
    noise = gumbel_noise([0, 0, 1, 2**64 - 1], [0, 1, 0, 7], 3)
    assert [f"{number:.9f}" for number in noise[:, [0, 2]].flatten()] == PINNED


def uniform_of(noise: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the Gumbel numbers were made of."""
    return np.asarray(np.exp(-np.exp(-noise)))


def test_numbers_are_uniform_over_positions_seeds_and_tokens() -> None:
    """Guards against a weak mix: neighbouring seeds, positions and ids must be unrelated."""
    for noise in (
        gumbel_noise([7] * 4000, list(range(4000)), 1)[:, 0],
        gumbel_noise(list(range(4000)), [7] * 4000, 1)[:, 0],
        gumbel_noise([7], [7], 4000)[0],
    ):
        numbers = uniform_of(noise)
        counts = torch.histc(torch.from_numpy(numbers), bins=8, min=0, max=1)
        assert float(((counts - 500) ** 2 / 500).sum()) < CHI_SQUARE_999[7]
        a, b = torch.from_numpy(numbers[:-1].copy()), torch.from_numpy(numbers[1:].copy())
        correlation = float(torch.corrcoef(torch.stack((a, b)))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(4000)


def test_tokens_at_one_position_and_positions_of_one_token_differ() -> None:
    """Guards the key: seed, position and id all count, and shifting one is not shifting another."""
    noise = gumbel_noise([3] * 50 + [4] * 50, [*range(50), *range(50)], 50)
    assert len(np.unique(noise)) == noise.size


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Guards temperature and the inverse of the cumulative distribution (chi-square)."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0]])
    num_draws = 4000
    rows = [row(temperature, seed=11, position=position) for position in range(num_draws)]
    drawn = torch.tensor(sample(logits.expand(num_draws, -1), rows))
    expected = (logits[0] / temperature).softmax(0) * num_draws
    counts = torch.bincount(drawn, minlength=4)
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_999[3]


def test_top_k_keeps_exactly_k_with_ties_by_id() -> None:
    """Guards the cut: a tie at the border goes to the smaller id, on every server."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]])
    probabilities = kept_probabilities(logits, [row(top_k=3)])
    assert (probabilities[0] > 0).tolist() == [True, True, False, False, True]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    """Guards the cut: the token that crosses p stays, the first token always stays."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, num_kept in ((0.5001, 2), (0.79, 2), (0.9, 3), (1e-9, 1), (0.0, 1), (1.0, 4)):
        probabilities = kept_probabilities(logits, [row(top_p=top_p)])
        assert int((probabilities[0] > 0).sum()) == num_kept, top_p


def test_top_p_reached_exactly_cuts_there() -> None:
    """Guards the border: a set that reaches p exactly is complete, nothing is added to it."""
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    assert (kept_probabilities(logits, [row(top_p=0.5)])[0] > 0).tolist() == [True, False, False]


def test_noise_between_equally_likely_tokens_changes_no_draw() -> None:
    """Guards cluster == one engine: other chunks and batches shift logits by float32 noise.
    A walk along the cumulative distribution answered otherwise in 0.2 to 11 % of draws: noise
    moves every border behind it, and by probability neighbours change places too."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 49_152, generator=generator)
    noise = torch.randn(1, 49_152, generator=generator).mul(1e-5)
    rows = [row(1.5, seed=5, position=position) for position in range(200)]
    exact = [sample(logits, [one])[0] for one in rows]
    noisy = [sample(logits + noise, [one])[0] for one in rows]
    assert exact == noisy


def test_top_p_is_measured_after_top_k() -> None:
    """Guards the order of the cuts: of the k kept, renormalised, the set that reaches p."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probabilities = kept_probabilities(logits, [row(top_k=2, top_p=0.55)])
    assert int((probabilities[0] > 0).sum()) == 1


def test_extreme_temperatures_and_logits() -> None:
    """Guards overflow: a tiny temperature is greedy, an infinite negative logit never drawn."""
    logits = torch.tensor([[100.0, -math.inf, 99.0, 80.0]])
    for position in range(50):
        assert sample(logits, [row(1e-4, position=position)]) == [0]
        assert sample(logits, [row(1e4, position=position)]) != [1]


def test_a_row_that_is_not_finite_is_named_and_alone() -> None:
    """Guards the batch: one request's NaN must not choose a token nor touch the others."""
    logits = random_logits(3)
    good = sample(logits, [row(0.0), row(1.0), row(0.0)])
    logits[1, 5] = math.nan
    assert sample(logits, [row(0.0), row(1.0), row(0.0)]) == [good[0], BAD_TOKEN_ID, good[2]]
