"""A checkpoint heavy enough to be seen in a process's memory, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from executor.engine.models.config import load_model_config
from executor.engine.weights import expected_shapes

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def save_heavy_checkpoint(folder: Path, seed: int = 5) -> int:
    """Random weights; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(load_model_config(folder))
    weights = {
        name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.nbytes for weight in weights.values())
