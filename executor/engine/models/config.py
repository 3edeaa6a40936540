"""A model's shape, read from a Hugging Face config.json or a GGUF file's metadata.

Pure: no torch. What a family's forward pass does not do (another rotary
scaling, mixed sliding windows, another activation) is refused here by name,
since ignoring it would give wrong tokens without a sound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from common.config_checks import refusal
from common.gguf_header import read_gguf_header
from common.model_files import (
    folder_eos_token_ids,
    gguf_eos_token_ids,
    is_gguf,
    read_json,
    require_model_path,
)
from protos.errors import ConfigError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_INTEGER_MAX = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    "linear" divides every frequency by `factor`; "llama3" does so for long
    waves only, with a smooth passage between the two frequency factors.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    family: Family
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    sliding_window: int | None
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on the query, key and value projections."""
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head's query and key, before the rotation."""
    eos_token_ids: tuple[int, ...]
    has_rope_factors: bool = False
    """Whether the weights bring a divisor for each rotary frequency: GGUF's way of telling
    Llama 3.1's scaling."""

    def __post_init__(self) -> None:
        _require(self.num_heads % self.num_kv_heads == 0, "num_key_value_heads", self.num_kv_heads)
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim)
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                limit = f"under vocab_size, {self.vocab_size}"
                raise refusal("eos_token_id", token_id, limit)


def load_model_config(path: Path) -> ModelConfig:
    """Raises ConfigError for missing or unreadable files and for what is not supported."""
    require_model_path(path)
    try:
        if is_gguf(path):
            header = read_gguf_header(path)
            return parse_gguf(header.metadata, header.tensor_names)
        return parse_hf(read_json(path / "config.json"), folder_eos_token_ids(path))
    except KeyError as error:
        raise ConfigError(
            f"model {path} does not say {error.args[0]!r}", field=str(error.args[0]), value=path
        ) from error
    except ConfigError as error:
        if str(path) in error.message:
            raise
        raise ConfigError(
            f"model {path}: {error.message}",
            field=error.field,
            value=error.value,
            limit=error.limit,
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {path}: {error}", field="model", value=path) from error


def parse_hf(config: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """From config.json's object. Raises KeyError for a missing required key."""
    family = _family(config.get("model_type"), "model_type")
    _refuse_unknown_math(config)
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    num_layers = _integer(config, "num_hidden_layers")
    has_bias = bool(config.get("attention_bias", False))
    rope = _hf_rope(config)
    return ModelConfig(
        family=family,
        architecture=ARCHITECTURES[family],
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=_integer(config, "head_dim", hidden_size // num_heads),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", _number(config, "rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(rope, _integer(config, "max_position_embeddings")),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        sliding_window=_hf_sliding_window(config, family, num_layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=family == "qwen2" or has_bias,
        attention_output_bias=family in ("llama", "qwen3") and has_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=eos_token_ids,
    )


def parse_gguf(metadata: Mapping[str, Any], tensor_names: tuple[str, ...]) -> ModelConfig:
    """From GGUF metadata; what it leaves unsaid shows in which tensors there are."""
    prefix = metadata["general.architecture"]
    family = _family(prefix, "general.architecture")

    def optional(key: str) -> Any:
        return metadata.get(f"{prefix}.{key}")

    hidden_size = _integer(metadata, f"{prefix}.embedding_length")
    num_heads = _integer(metadata, f"{prefix}.attention.head_count")
    head_dim = int(optional("attention.key_length") or hidden_size // num_heads)
    rotary_dim = int(optional("rope.dimension_count") or head_dim)
    _require(rotary_dim == head_dim, "rope.dimension_count", rotary_dim)
    scaling = {
        "rope_type": optional("rope.scaling.type") or "default",
        "factor": optional("rope.scaling.factor") or 1.0,
    }
    max_positions = _integer(metadata, f"{prefix}.context_length")
    return ModelConfig(
        family=family,
        architecture=ARCHITECTURES[family],
        vocab_size=int(optional("vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
        hidden_size=hidden_size,
        intermediate_size=_integer(metadata, f"{prefix}.feed_forward_length"),
        num_layers=_integer(metadata, f"{prefix}.block_count"),
        num_heads=num_heads,
        num_kv_heads=int(optional("attention.head_count_kv") or num_heads),
        head_dim=head_dim,
        rms_norm_eps=_short_float(metadata[f"{prefix}.attention.layer_norm_rms_epsilon"]),
        rope_theta=float(optional("rope.freq_base") or 10_000.0),
        rope_scaling=_rope_scaling(scaling, max_positions),
        max_position_embeddings=max_positions,
        sliding_window=int(optional("attention.sliding_window") or 0) or None,
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        eos_token_ids=gguf_eos_token_ids(metadata),
        has_rope_factors="rope_freqs.weight" in tensor_names,
    )


def _family(name: Any, field: str) -> Family:
    for family in ARCHITECTURES:
        if name == family:
            return family
    raise ConfigError(
        f"model family {name!r} is not supported; known are {', '.join(ARCHITECTURES)}",
        field=field,
        value=name,
        limit=", ".join(ARCHITECTURES),
    )


def _integer(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Raises KeyError for a missing key without a default; ConfigError for no size of anything."""
    value = source[key] if default is None else source.get(key) or default
    if not isinstance(value, int) or not 1 <= value <= _INTEGER_MAX:
        raise refusal(key, value, f"an integer from 1 to {_INTEGER_MAX}")
    return value


def _number(source: Mapping[str, Any], key: str, default: float) -> float:
    value = source.get(key) or default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise refusal(key, value, "a number over 0")
    return float(value)


def _require(is_met: bool, field: str, value: object) -> None:
    if not is_met:
        raise ConfigError(f"{field} {value!r} is not supported", field=field, value=value)


def _refuse_unknown_math(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    _require(activation == "silu", "hidden_act", activation)
    rotary_share = config.get("partial_rotary_factor", 1.0)
    _require(rotary_share in (None, 1.0), "partial_rotary_factor", rotary_share)
    quantization = config.get("quantization_config")
    _require(quantization is None, "quantization_config", quantization)


def _hf_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer files say `rope_parameters`, older ones `rope_scaling` beside `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError("rope_parameters must be an object", field="rope_parameters", value=rope)
    return rope


def _rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "none"):
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings") or max_positions),
        )
    raise ConfigError(
        f"rotary scaling {kind!r} is not supported; known are default, linear, llama3",
        field="rope_scaling",
        value=kind,
        limit="default, linear, llama3",
    )


def _hf_sliding_window(config: Mapping[str, Any], family: Family, num_layers: int) -> int | None:
    """One window for all layers, or none. Layers that differ are refused."""
    window = config.get("sliding_window")
    if family == "llama" or not window:
        return None
    if family == "mistral":
        return int(window)
    if not config.get("use_sliding_window", False):
        return None
    first = int(config.get("max_window_layers") or 0)
    if first >= num_layers:
        return None
    _require(first == 0, "max_window_layers", first)
    return int(window)


def _short_float(value: float) -> float:
    """GGUF stores float32: 9.99999975e-06 was written as 1e-05."""
    return float(f"{value:.7g}")
