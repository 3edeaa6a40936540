"""What is looked at in this process before an engine is started: is there a model, can we
run it, and how is its text made? Are there files enough? A mistake is then told within a
moment, not by a worker."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from common.text.tokenizer import Tokenizer, load_tokenizer
from executor.config import EngineConfig
from executor.engine.models.config import load_model_config
from executor.engine.scripted_model import ARCHITECTURE
from protos.errors import ConfigError
from protos.messages import ModelInfo

OPEN_FILES_MIN = 256
FREE_FILES_MIN = 64


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


def check_open_files() -> None:
    """Raises ConfigError. With a few dozen zmq itself aborts the process where it runs out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    if soft < OPEN_FILES_MIN:
        raise ConfigError(
            f"this process may open {soft} files; it must be at least {OPEN_FILES_MIN}, and with "
            "many clients more: ulimit -n 4096",
            field="nofile",
            value=soft,
            limit=OPEN_FILES_MIN,
        )
    num_open = len(os.listdir("/proc/self/fd"))
    if soft - num_open < FREE_FILES_MIN:
        raise ConfigError(
            f"this process has {num_open} of the {soft} files open that it may; at least "
            f"{FREE_FILES_MIN} must be free: ulimit -n {num_open + OPEN_FILES_MIN}",
            field="nofile",
            value=num_open,
            limit=soft - FREE_FILES_MIN,
        )


def why_no_text(config: EngineConfig, model: ModelInfo) -> str:
    """What to say where an engine elsewhere has a model and this process no tokenizer for it."""
    if not config.executor.rpc_address or config.model or model.architecture == ARCHITECTURE:
        return ""
    return (
        "engine.model is not set, so this server takes token ids and refuses text and chat: set it "
        f"to a folder or GGUF file of the worker's model, {model.limits.model!r}, for its "
        "tokenizer; the weights stay with the worker"
    )


def load_own_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """None where no model is named: requests then bring token ids. Raises ConfigError."""
    return load_tokenizer(Path(config.model)) if config.model else None
