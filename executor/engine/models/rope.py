"""Rotary position embeddings: Su et al., RoFormer, 2021 (arXiv 2104.09864).

The halves convention of Hugging Face checkpoints: dimension i is rotated
together with dimension i + head_dim / 2.
"""

from __future__ import annotations

import math

import torch

from executor.engine.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """[head_dim / 2], float32, with the model's scaling applied.

    `factors` are divisors that came with the weights (GGUF's `rope_freqs`).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if factors is not None:
        frequencies = frequencies / factors.float().cpu()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    num_original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((num_original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def cos_sin_tables(
    config: ModelConfig,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tables [num_positions, head_dim], computed in float32."""
    frequencies = inverse_frequencies(config, factors)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` is [tokens, heads, head_dim], the tables' rows are [tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
