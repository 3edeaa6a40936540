"""A model's weights under their Hugging Face names, checked one by one.

Sources: a folder with safetensors (one file, or several with an index) or a
GGUF file (`gguf_weights`). A tensor that is missing, not known or of another
shape than the configuration says is refused by name before a step can run.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch

from common.model_files import is_gguf, read_json, require_model_path
from executor.engine.gguf_weights import ROPE_FACTORS, read_tensors
from executor.engine.models.config import ModelConfig, load_model_config
from protos.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAMPLES = 128
SAMPLE_BYTES = 4096
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_tensor: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """All weights, in the order of `expected_shapes`; `on_tensor` hears of each.

    "lm_head.weight" is absent where the model ties it to the embeddings.
    Raises ConfigError that names the tensor.
    """
    require_model_path(path)
    expected = expected_shapes(config)
    loaded: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(path, config):
        on_tensor()
        if name.endswith(IGNORED_SUFFIXES) or (
            name == "lm_head.weight" and config.tie_word_embeddings
        ):
            continue
        _check_shape(path, name, tuple(tensor.shape), expected)
        kept = torch.float32 if name == ROPE_FACTORS else dtype
        loaded[name] = tensor.to(device=device, dtype=kept).contiguous()
    missing = [name for name in expected if name not in loaded]
    if missing:
        raise ConfigError(
            f"{path} lacks the tensor {missing[0]!r} ({len(missing)} in all)",
            field="model",
            value=missing[0],
        )
    return {name: loaded[name] for name in expected}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the model must have."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size)
    }
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if config.has_rope_factors:
        shapes[ROPE_FACTORS] = (config.head_dim // 2,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def model_fingerprint(path: Path, dtype_name: str) -> str:
    """Names what a KV cache depends on: the weights, the model's shape, the dtype.

    Weight files are sampled evenly, not read in full, so that it takes
    milliseconds; another training run differs everywhere. Where the files lie
    and when they were written does not count.
    """
    shape = dataclasses.replace(load_model_config(path), eos_token_ids=())
    digest = hashlib.blake2b(f"{dtype_name}\x00{shape!r}".encode(), digest_size=16)
    for file in _weight_files(path):
        _update_with_samples(digest, file)
    return digest.hexdigest()


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        shapes["self_attn.q_proj.bias"] = (queries,)
        shapes["self_attn.k_proj.bias"] = (keys,)
        shapes["self_attn.v_proj.bias"] = (keys,)
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,)}
        shapes["mlp.down_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,)}
        shapes |= {"self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def _check_shape(
    path: Path, name: str, shape: tuple[int, ...], expected: dict[str, tuple[int, ...]]
) -> None:
    if name not in expected:
        raise ConfigError(
            f"{path} has a tensor that this model should not have: {name!r}",
            field="model",
            value=name,
        )
    if shape != expected[name]:
        raise ConfigError(
            f"{path}: tensor {name!r} has the shape {shape}, not {expected[name]}",
            field=name,
            value=shape,
            limit=expected[name],
        )


def _tensors(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    if is_gguf(path):
        yield from read_tensors(path, config)
        return
    for file in _weight_files(path):
        try:
            with safetensors.safe_open(str(file), framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f"cannot read {file}: {error}", field="model", value=str(file)
            ) from error


def _weight_files(path: Path) -> list[Path]:
    if is_gguf(path):
        return [path]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    names = sorted(set(read_json(path / INDEX_FILE).get("weight_map", {}).values()))
    files = [path / Path(name).name for name in names]
    absent = [file for file in files if not file.is_file()] if files else [path / SINGLE_FILE]
    if absent:
        raise ConfigError(f"{absent[0]} does not exist", field="model", value=str(path))
    return files


def _update_with_samples(digest: Any, file: Path) -> None:
    """Hash the file's size and evenly spread samples of it, first and last bytes included."""
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    last = max(0, size - SAMPLE_BYTES)
    with file.open("rb") as opened:
        for i in range(SAMPLES):
            opened.seek(last * i // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
