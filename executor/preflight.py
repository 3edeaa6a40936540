"""What is looked at in this process before an engine is started: is there a model, can we
run it, and how is its text made? A mistake is then told within a moment, not by a worker."""

from __future__ import annotations

from pathlib import Path

from common.text.tokenizer import Tokenizer, load_tokenizer
from executor.config import EngineConfig
from executor.engine.models.config import load_model_config
from protos.errors import ConfigError


def check_model(config: EngineConfig, field: str = "model") -> None:
    """Raises ConfigError for a model that is missing or that no engine of ours runs."""
    if config.engine != "torch":
        return
    if not config.model:
        raise ConfigError(
            f"{field} is empty; it must name a Hugging Face folder or a GGUF file "
            "(`baton model demo` prints one)",
            field=field,
        )
    load_model_config(Path(config.model))


def load_own_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """None where no model is named: requests then bring token ids. Raises ConfigError."""
    return load_tokenizer(Path(config.model)) if config.model else None
