"""ModelConfig: what is read, and what is refused because it would give wrong tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor.engine.models.config import (
    RopeScaling,
    load_model_config,
    parse_gguf,
    parse_hf,
)
from protos.errors import ConfigError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 256,
    "llama.feed_forward_length": 64,
    "llama.block_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "tokenizer.ggml.tokens": ["x"] * 100,
}


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling("linear", 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        ),
    ],
)
def test_rotation_in_old_and_new_spelling(
    rope: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    """transformers 5 moved rope_theta; reading the default instead gives fluent nonsense."""
    config = parse_hf({**BASE, **rope}, ())
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 64}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, None),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            None,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            64,
        ),
    ],
)
def test_sliding_window_by_family(changes: dict[str, Any], window: int | None) -> None:
    """Qwen files carry a window that is switched off."""
    assert parse_hf({**BASE, **changes}, ()).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": None}, "None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            "max_window_layers",
        ),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(changes: dict[str, Any], named: str) -> None:
    """Ignored settings give wrong tokens without a sound."""
    with pytest.raises(ConfigError, match=named):
        parse_hf({**BASE, **changes}, ())


def test_family_traits() -> None:
    """Qwen2 has biases though its config.json does not say so; Qwen3 has q/k norms."""
    qwen2 = parse_hf({**BASE, "model_type": "qwen2"}, ())
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
    )
    qwen3 = parse_hf({**BASE, "model_type": "qwen3", "head_dim": 16}, ())
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    llama = parse_hf({**BASE, "attention_bias": True, "mlp_bias": True}, ())
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)


def test_gguf_says_the_same_as_config_json() -> None:
    """float32 metadata must not shift the epsilon; a missing output tensor means tied."""
    assert parse_gguf(GGUF, ()) == parse_hf({**BASE, "tie_word_embeddings": True}, ())
    assert not parse_gguf(GGUF, ("output.weight",)).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "tensors", "named"),
    [
        ({"general.architecture": "gemma3"}, (), "gemma3"),
        ({"llama.rope.dimension_count": 4}, (), "rope.dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, (), "yarn"),
    ],
)
def test_gguf_that_is_not_supported(
    changes: dict[str, Any], tensors: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_gguf({**GGUF, **changes}, tensors)


def test_missing_and_malformed_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="num_attention_heads"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "vocab_size": "many"}))
    with pytest.raises(ConfigError, match="many"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="neither"):
        load_model_config(tmp_path / "absent")
