"""A lean decoder for the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM.

One code path on CPU and CUDA, float32 and bfloat16. What differs between the
families is told by the weights and the configuration alone: biases (Qwen2),
RMS norms on queries and keys (Qwen3), a sliding window (Mistral). Query, key
and value projections are one matrix, gate and up projections another.

Shapes: T tokens, E hidden, H query heads, K KV heads, D head_dim, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from executor.engine.attention.paged import AttentionPlan, attend
from executor.engine.models.config import ModelConfig
from executor.engine.models.linear import Linear
from executor.engine.models.rope import cos_sin_tables, rotate

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Progress:
    """Signs of life within long work: layers run, tensors loaded. Outlives the model."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1


class LlamaModel:
    """`weights` are by Hugging Face names; they are taken out as they are fused."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self._progress = progress or Progress()
        rope_factors = weights.pop("rope_freqs.weight", None)
        self.num_parameters = sum(weight.numel() for weight in weights.values())
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [self._load_layer(weights, index) for index in range(config.num_layers)]
        self.norm = weights["model.norm.weight"]
        head = weights.get("lm_head.weight")
        self.head = Linear(self.embedding if head is None else head)
        self.cos, self.sin = cos_sin_tables(config, num_positions, dtype, device, rope_factors)

    def _load_layer(self, weights: Weights, index: int) -> _Layer:
        self._progress.step()
        return _load_layer(weights, index)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, plan: AttentionPlan, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(logit_rows), vocabulary], float32, of those of the T tokens."""
        x_te = F.embedding(token_ids, self.embedding)
        cos = self.cos[plan.positions][:, None]
        sin = self.sin[plan.positions][:, None]
        for index, layer in enumerate(self.layers):
            x_te = x_te + self._attention(index, layer, x_te, cos, sin, plan)
            x_te = x_te + self._mlp(layer, x_te)
            self._progress.step()
        if len(logit_rows) == 0:
            return x_te.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.head(self._rms_norm(x_te[logit_rows], self.norm)).float()

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x_te: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(self._rms_norm(x_te, layer.input_norm))
        qkv = qkv.view(len(x_te), num_heads + 2 * num_kv_heads, config.head_dim)
        q_thd, k_tkd, v_tkd = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_thd = self._rms_norm(q_thd, layer.q_norm)
            k_tkd = self._rms_norm(k_tkd, layer.k_norm)
        q_thd, k_tkd = rotate(q_thd, cos, sin), rotate(k_tkd, cos, sin)
        return layer.out(attend(plan, index, q_thd, k_tkd, v_tkd))

    def _mlp(self, layer: _Layer, x_te: torch.Tensor) -> torch.Tensor:
        gate_ti, up_ti = layer.gate_up(self._rms_norm(x_te, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate_ti) * up_ti)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)


def _load_layer(weights: Weights, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return _Layer(
        input_norm=weights.pop(f"{prefix}input_layernorm.weight"),
        qkv=_fused(weights, [f"{attention}{name}_proj" for name in "qkv"]),
        q_norm=weights.pop(f"{attention}q_norm.weight", None),
        k_norm=weights.pop(f"{attention}k_norm.weight", None),
        out=_fused(weights, [f"{attention}o_proj"]),
        mlp_norm=weights.pop(f"{prefix}post_attention_layernorm.weight"),
        gate_up=_fused(weights, [f"{mlp}gate_proj", f"{mlp}up_proj"]),
        down=_fused(weights, [f"{mlp}down_proj"]),
    )


def _fused(weights: Weights, names: list[str]) -> Linear:
    """One linear layer whose outputs are those of `names`, side by side."""
    weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
    biases = [weights.pop(f"{name}.bias", None) for name in names]
    present = [bias for bias in biases if bias is not None]
    assert len(present) in (0, len(names)), f"{names}: some have a bias and some have none"
    return Linear(weight, torch.cat(present) if present else None)
