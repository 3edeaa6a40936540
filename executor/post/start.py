"""Whether a frontend has postprocess workers, and which tokenizer they are told to load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from common.text.detokenizer import Decoder
from common.text.tokenizer import Tokenizer
from executor.config import EngineConfig
from executor.limits import ExecutorLimits
from executor.post.pool import PostPool
from executor.post.spec import TokenizerSpec
from protos.errors import ConfigError


class MakePost(Protocol):
    def __call__(self, *, on_pressure: Callable[[bool], bool]) -> PostPool: ...


def post_maker(
    config: EngineConfig,
    name: str,
    limits: ExecutorLimits,
    tokenizer: Decoder | None,
    spec: TokenizerSpec | None,
) -> MakePost | None:
    """None where the frontend makes its text itself. Raises ConfigError."""
    num_workers = config.executor.postprocess_workers
    if not num_workers:
        return None
    if spec is None:
        spec = _model_tokenizer(config, tokenizer)
    return functools.partial(PostPool, num_workers, spec, name=name, limits=limits)


def _model_tokenizer(config: EngineConfig, tokenizer: Decoder | None) -> TokenizerSpec:
    if tokenizer is None or not config.model:
        why = "there is no tokenizer for them to load: this engine has no model"
    elif not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        why = f"the custom tokenizer ({kind}) that was given here does not cross to a process"
    else:
        return TokenizerSpec(model=config.model)
    raise ConfigError(
        f"executor.postprocess_workers is {config.executor.postprocess_workers}, but {why}",
        field="executor.postprocess_workers",
        value=config.executor.postprocess_workers,
        limit="0",
    )
