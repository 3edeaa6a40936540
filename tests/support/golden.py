"""The reference prompts of the demo model (made by make_golden.py) and how tests run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from baton.demo_model import demo_model_folder


@dataclass(frozen=True)
class GoldenPrompt:
    """`output_ids` are float32 greedy ids of `transformers`, end-of-sequence ignored."""

    name: str
    prompt_ids: list[int]
    output_ids: list[int]
    output_text: str
    least_margin: float


def _load() -> list[GoldenPrompt]:
    data = json.loads(Path(__file__).with_name("golden_prompts.json").read_text())
    names = [field.name for field in fields(GoldenPrompt)]
    return [GoldenPrompt(**{name: prompt[name] for name in names}) for prompt in data["prompts"]]


GOLDEN = _load()


@cache
def demo_model() -> Path:
    return demo_model_folder()


def demo_engine(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """The engine section of a server that runs the demo model on one thread."""
    return {
        "model": str(demo_model()),
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache": {"num_blocks": 512, "tokens_per_block": 16},
        **sections,
    }
