"""Which tokenizer a postprocess worker loads: by name, never by value.

A tokenizer object does not cross a process boundary; a model's path does, and so
does the name of something importable (`module:attribute`, called without
arguments), for engines without a model.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec

from common.text.detokenizer import Decoder
from common.text.tokenizer import load_tokenizer
from protos.errors import ConfigError


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the two is set."""

    model: str = ""
    factory: str = ""

    def load(self) -> Decoder:
        """Raises ConfigError where there is none such."""
        if self.model:
            return load_tokenizer(Path(self.model))
        return _call(self.factory)


def _call(name: str) -> Decoder:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer {name!r} cannot be imported: {error}",
            field="tokenizer",
            value=name,
            limit="module:attribute",
        ) from error
    decoder: Decoder = found()
    return decoder
