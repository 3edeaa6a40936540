"""What a model's files say: a Hugging Face folder's JSON, a GGUF file's metadata.

Both the tokenizer (common) and the model's configuration (executor) read them
here, so that they agree, above all on which tokens end an answer. Every failure
is a ConfigError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.errors import ConfigError

GGUF_END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def require_model_path(path: Path) -> None:
    """Raises ConfigError unless `path` is a folder with a config.json or a GGUF file."""
    if is_gguf(path) and path.is_file():
        return
    if path.is_dir() and (path / "config.json").is_file():
        return
    raise ConfigError(
        f"model {str(path)!r} is neither a folder with a config.json nor a .gguf file "
        "(`baton model demo` prints one)",
        field="model",
        value=str(path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. A missing file reads as empty."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="model", value=str(path)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object", field="model", value=str(path))
    return data


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    return _distinct([metadata.get(key) for key in GGUF_END_KEYS])


def folder_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """All ids that end an answer, generation_config.json's first.

    Chat models often have several, spread over generation_config.json,
    config.json and the tokenizer's own `eos_token`.
    """
    named = [
        read_json(folder / name).get("eos_token_id")
        for name in ("generation_config.json", "config.json")
    ]
    return _distinct([*named, _tokenizer_eos_id(folder)])


def token_text(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _tokenizer_eos_id(folder: Path) -> int | None:
    eos = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if eos is None:
        return None
    tokenizer = read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == eos:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(eos) if isinstance(vocab, dict) else None


def _distinct(values: list[Any]) -> tuple[int, ...]:
    """The ids in order of first mention; a value may be an id, a list of ids or None."""
    ids: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)
