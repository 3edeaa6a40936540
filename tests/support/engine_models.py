"""Tiny random checkpoints, made by transformers, and what transformers says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def _config(family: str) -> Any:
    match family:
        case "llama":
            return transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True)
        case "llama-llama3-rope":
            return transformers.LlamaConfig(
                **_COMMON, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE
            )
        case "llama-linear-rope":
            return transformers.LlamaConfig(
                **_COMMON, tie_word_embeddings=False, rope_parameters=_LINEAR_ROPE
            )
        case "mistral":
            return transformers.MistralConfig(**_COMMON, sliding_window=24, head_dim=8)
        case "qwen2":
            return transformers.Qwen2Config(**_COMMON, use_sliding_window=False)
        case "qwen3":
            return transformers.Qwen3Config(**_COMMON, use_sliding_window=False, head_dim=16)
        case _:
            raise AssertionError(family)


FAMILIES = ("llama", "llama-llama3-rope", "llama-linear-rope", "mistral", "qwen2", "qwen3")


def reference_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights large enough that tokens vary, biases and norms included."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        _config(family), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.15 if parameter.dim() > 1 else 0.3))
    return model.to(dtype).eval()


def save_checkpoint(family: str, folder: Path) -> Path:
    reference_model(family).save_pretrained(folder)
    return folder


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], float32."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens, the whole sequence recomputed for each one."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids
