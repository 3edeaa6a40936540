"""Weights arrive as they were saved: from transformers' folders and from GGUF."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from executor.engine.gguf_weights import unpermute
from executor.engine.models.config import ModelConfig, load_model_config
from executor.engine.models.llama import LlamaModel
from executor.engine.models.rope import cos_sin_tables, inverse_frequencies
from executor.engine.weights import expected_shapes, load_weights, model_fingerprint
from protos.errors import ConfigError

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama_biases": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama3_rope": lambda: transformers.LlamaConfig(
        **SHAPE,
        head_dim=32,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=16),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
}


def tiny(kind: str) -> Any:
    """A random model; every tensor differs from its neighbours, norms and biases too."""
    torch.manual_seed(5)
    factory: Any = transformers.AutoModelForCausalLM
    model = factory.from_config(KINDS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def reference(model: Any, config: ModelConfig) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", ["50GB", "30KB"])
def test_folder_equals_the_model_that_was_saved(tmp_path: Path, kind: str, shard: str) -> None:
    """Each family's own tensors (biases, norms, head_dim) and sharded files."""
    model = tiny(kind)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    is_sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert is_sharded == (shard == "30KB")
    config = load_model_config(tmp_path)
    assert config.architecture == type(model).__name__
    expected = reference(model, config)
    loaded = load_weights(tmp_path, config, torch.float32, CPU)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
    in_bf16 = load_weights(tmp_path, config, torch.bfloat16, CPU)
    for name, tensor in in_bf16.items():
        assert torch.equal(tensor, expected[name].bfloat16()), name


def permute(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order, row by row: row 2i of a head is its i-th, row 2i+1 its (d/2+i)-th."""
    head_dim = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = rows[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = rows[head * head_dim + head_dim // 2 + i]
    return out


def test_unpermute_undoes_llama_cpp_order() -> None:
    rows = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    assert np.array_equal(unpermute(permute(rows, 4), 4), rows)
    bias = np.arange(32, dtype=np.float32)
    assert np.array_equal(unpermute(permute(bias, 4), 4), bias)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "rope_freqs.weight":
        return name
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def write_gguf(path: Path, arch: str, config: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, tensor in state.items():
        array, target = tensor.float().numpy(), gguf_name(name)
        if arch == "llama" and target.split(".")[-2] in heads:
            array = permute(array, heads[target.split(".")[-2]])
        if target == "blk.0.ffn_up.weight":  # one quantised tensor among them
            array = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, array, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "arch"),
    [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_gguf_equals_the_folder(tmp_path: Path, kind: str, arch: str) -> None:
    """Rows of q and k are permuted for "llama" alone; doing so for Qwen ruins its attention."""
    model = tiny(kind)
    model.save_pretrained(tmp_path / "hf")
    config = load_model_config(tmp_path / "hf")
    expected = reference(model, config)
    path = tmp_path / "model.gguf"
    write_gguf(path, arch, config, expected)
    from_gguf = load_model_config(path)
    same = dataclasses.replace(
        config,
        family=from_gguf.family,
        architecture=from_gguf.architecture,
        sliding_window=None,
        eos_token_ids=(),
    )
    assert from_gguf == same
    loaded = load_weights(path, from_gguf, torch.float32, CPU)
    for name, tensor in expected.items():
        tolerance = 0.01 if name == "model.layers.0.mlp.up_proj.weight" else 0.0
        assert torch.allclose(loaded[name], tensor, rtol=0, atol=tolerance), name
    assert loaded.keys() == expected.keys()


def test_gguf_tells_llama3_rope_by_factors(tmp_path: Path) -> None:
    """GGUF files of Llama 3.1 and later carry a divisor for each rotary frequency instead of
    the scaling's parameters: they were refused, and ignoring them would give wrong tokens."""
    model = tiny("llama3_rope")
    model.save_pretrained(tmp_path / "hf")
    config = load_model_config(tmp_path / "hf")
    plain = dataclasses.replace(config, rope_scaling=None)
    factors = inverse_frequencies(plain) / inverse_frequencies(config)
    assert factors.max() > 1.5
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", config, {**reference(model, config), "rope_freqs.weight": factors})
    from_gguf = load_model_config(path)
    assert from_gguf.has_rope_factors
    assert from_gguf.rope_scaling is None
    loaded = load_weights(path, from_gguf, torch.bfloat16, CPU)
    assert loaded["rope_freqs.weight"].dtype is torch.float32
    torch.testing.assert_close(
        inverse_frequencies(from_gguf, loaded["rope_freqs.weight"]), inverse_frequencies(config)
    )
    tables = LlamaModel(from_gguf, loaded, num_positions=64, dtype=torch.float32, device=CPU)
    expected, _ = cos_sin_tables(config, 64, torch.float32, CPU)
    torch.testing.assert_close(tables.cos, expected)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape"])
def test_wrong_tensor_is_named(tmp_path: Path, damage: str) -> None:
    """A silent default or an ignored tensor would give wrong tokens."""
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(str(file))
    name = "model.layers.1.self_attn.k_proj.weight"
    if damage == "missing":
        del state[name]
    elif damage == "shape":
        state[name] = state[name][:-1].contiguous()
    else:
        name = "model.layers.1.self_attn.k_proj.bias"
        state[name] = torch.zeros(16)
    save_file(state, str(file))
    with pytest.raises(ConfigError, match=name):
        load_weights(tmp_path, load_model_config(tmp_path), torch.float32, CPU)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_weights(tmp_path, config, torch.float32, CPU)
    file.unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors does not exist"):
        load_weights(tmp_path, config, torch.float32, CPU)
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"outside\.safetensors does not exist"):
        load_weights(tmp_path, config, torch.float32, CPU)


def test_fingerprint_tells_models_apart_and_copies_not(tmp_path: Path) -> None:
    """KV of other weights must never be taken for ours; a copy elsewhere must."""
    model = tiny("llama")
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "c")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    model.save_pretrained(tmp_path / "d")
    prints = [model_fingerprint(tmp_path / name, "float32") for name in "abcd"]
    assert prints[0] == prints[1]
    assert len({*prints, model_fingerprint(tmp_path / "a", "bfloat16")}) == 4


def test_expected_shapes_match_the_parameter_count() -> None:
    config = load_config_of("qwen3")
    total = sum(int(np.prod(shape)) for shape in expected_shapes(config).values())
    assert total == sum(p.numel() for p in tiny("qwen3").parameters())


def load_config_of(kind: str) -> ModelConfig:
    from executor.engine.models.config import parse_hf

    return parse_hf(KINDS[kind]().to_dict(), ())
