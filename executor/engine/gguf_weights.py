"""GGUF tensors as float32 arrays under Hugging Face names. No torch but at the door.

Tensors are dequantised one at a time, so the peak is the model plus one tensor.
llama.cpp keeps the query and key rows of the "llama" architecture (Mistral's
files included) in an interleaved order for its rotary kernel; here they are put
back into halves. Other architectures' rows are stored as trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from executor.engine.models.config import ModelConfig
from protos.errors import ConfigError

if TYPE_CHECKING:
    import torch

TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ROPE_FACTORS = "rope_freqs.weight"
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FloatArray = npt.NDArray[np.float32]


def read_tensors(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name, array in read_arrays(path, config):
        yield name, torch.from_numpy(array)


def read_arrays(path: Path, config: ModelConfig) -> Iterator[tuple[str, FloatArray]]:
    """Every tensor, float32, as (Hugging Face name, fresh contiguous array).

    Raises ConfigError for a tensor whose name or quantisation is not known.
    """
    for tensor in _open(path).tensors:
        name = hf_name(str(tensor.name))
        array = _dequantize(path, tensor)
        yield name, _unpermute_if_needed(name, array, config)


def hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" is "model.layers.3.self_attn.q_proj.weight"."""
    if name == ROPE_FACTORS:
        return name  # Hugging Face has no such tensor
    stem, _, kind = name.rpartition(".")
    if stem in TOP_LEVEL and kind == "weight":
        return f"{TOP_LEVEL[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in IN_LAYER:
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{kind}"
    raise ConfigError(
        f"GGUF tensor {name!r} belongs to no supported model", field="model", value=name
    )


def _open(path: Path) -> Any:
    """A reader that maps the tensors and copies nothing."""
    import gguf

    try:
        return gguf.GGUFReader(str(path))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"cannot read {path} as GGUF: {error}", field="model", value=str(path)
        ) from error


def _dequantize(path: Path, tensor: Any) -> FloatArray:
    from gguf.quants import dequantize

    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"{path}: tensor {tensor.name!r} has the type {tensor.tensor_type.name}, "
            "which cannot be dequantised",
            field=str(tensor.name),
            value=tensor.tensor_type.name,
        ) from error
    return np.array(array, dtype=np.float32, order="C")


def _unpermute_if_needed(name: str, array: FloatArray, config: ModelConfig) -> FloatArray:
    if config.family != "llama":
        return array
    if ".self_attn.q_proj." in name:
        return unpermute(array, config.num_heads)
    if ".self_attn.k_proj." in name:
        return unpermute(array, config.num_kv_heads)
    return array


def unpermute(rows: FloatArray, num_heads: int) -> FloatArray:
    """Each head's rows from pairs (0, d/2, 1, d/2+1, ...) to halves (0, 1, ..., d/2, ...)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
