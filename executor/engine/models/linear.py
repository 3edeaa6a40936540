"""Linear layers, with weights packed once by oneDNN on a CPU.

Decoding a handful of rows spends its time in small matrix products. oneDNN's
own packed layout makes them three to six times faster than `F.linear` on a CPU
where PyTorch's default is MKL and MKL does not know the processor (measured on
an AMD EPYC: 3072x576 by 8 rows 643 us -> 146 us), equals MKL's packed weights
elsewhere, and serves bfloat16 as well. The two operators are private to
PyTorch (they are what its compiler emits), so they are tried once against
`F.linear` and left alone where they are missing or wrong.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812

_PACKED_FOR_ROWS = 16
"""A hint: the layout chosen for it serves any number of rows equally well."""


class Linear:
    """y = x W^T + b. `x` is [rows, in_features]; keeps the packed weight alone where it packs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.is_packed = can_pack(weight.device, weight.dtype)
        self.weight = pack(weight) if self.is_packed else weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return _packed_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@functools.cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights exist here and compute what `F.linear` computes."""
    is_candidate = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if not is_candidate or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 0.25
    try:
        packed = pack(weight)
        return all(
            torch.allclose(
                _packed_linear(x, packed, bias), F.linear(x, weight, bias), atol=tolerance
            )
            for rows in (1, 2, 5, 33, 200)
            for x in (torch.randn(rows, 64, generator=generator).to(dtype),)
        )
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
