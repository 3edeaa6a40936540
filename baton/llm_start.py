"""What an `LLM` is started with: its arguments, made into what an executor takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton.launch.config import DEMO_MODEL
from common.config import parse_config
from common.security import load_secret
from common.text.tokenizer import Tokenizer, load_tokenizer
from executor.config import EngineConfig
from executor.post.spec import TokenizerSpec
from executor.preflight import load_own_tokenizer
from protos.errors import ConfigError

if TYPE_CHECKING:
    from executor.attach.point import AttachPoint


def check_place() -> None:
    """Raises ConfigError where this process stands in a folder that is gone: the engine's
    processes, and torch, fail there with errors that name everything else."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory cannot be used ({error.strerror}); os.chdir to one that exists",
            field="working directory",
        ) from None


def model_of(model: str | Path, progress: Callable[[str], None] | None) -> str:
    """As `baton up --model` takes it."""
    if str(model) != DEMO_MODEL:
        return str(model)
    from baton.demo_model import demo_model_folder

    return str(demo_model_folder(progress=progress or (lambda _: None)))


def engine_config_of(
    model: str,
    executor: str | Mapping[str, Any] | None,
    config: EngineConfig | None,
    engine: dict[str, Any],
) -> EngineConfig:
    """Without a `config`, KV stays in the engine's process: nobody fetches it from an LLM."""
    if config is not None and engine:
        raise ConfigError(
            f"config is given, and so is {next(iter(engine))}; give a whole config or its keys",
            field="config",
        )
    keys = msgspec.to_builtins(engine if config is None else config)
    if config is None:
        keys.setdefault("transfer", {"transport": "inproc"})
    if model:
        keys["model"] = model
    if executor is not None:
        keys["executor"] = {"form": executor} if isinstance(executor, str) else dict(executor)
    return parse_config(keys, EngineConfig, source="LLM")


def text_side(
    given: Tokenizer | str | Path | None, config: EngineConfig
) -> tuple[Tokenizer | None, TokenizerSpec | None]:
    """And what postprocess workers load, where that is not the model's own."""
    if given is None:
        return load_own_tokenizer(config), None
    if isinstance(given, str | Path):
        return load_tokenizer(Path(given)), TokenizerSpec(model=str(given))
    num_workers = config.executor.postprocess_workers
    if num_workers:
        raise ConfigError(
            f"executor.postprocess_workers is {num_workers}; it must be 0, since a tokenizer that "
            "is an object of this process does not cross to them; give a path",
            field="executor.postprocess_workers",
            value=num_workers,
            limit="0",
        )
    return given, None


def point_of(config: EngineConfig, secret_file: str | Path | None) -> AttachPoint | None:
    """Where an engine of another process is, if it is one."""
    address = config.executor.rpc_address
    if not address:
        return None
    if secret_file is None:
        raise ConfigError(
            f"executor.rpc_address is {address}, and secret_file is not given; it must name the "
            "file with the secret of that worker's cluster",
            field="secret_file",
        )
    from executor.attach.point import rpc_point

    return rpc_point(config, load_secret(Path(secret_file)))


def room_of(config: EngineConfig) -> int:
    """Requests that the engine may hold at once: enough that it never runs dry, and few
    enough that it never refuses one, and that none waits long in its queue."""
    scheduler = config.scheduler
    return min(2 * scheduler.max_sequences, scheduler.max_queued)
