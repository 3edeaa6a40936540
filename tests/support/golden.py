"""Reads the golden prompts (made by make_golden.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class GoldenPrompt:
    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_text: str
    least_margin: float


def golden_prompts() -> tuple[GoldenPrompt, ...]:
    data = json.loads(Path(__file__).with_name("golden_prompts.json").read_text(encoding="utf-8"))
    return tuple(
        GoldenPrompt(
            entry["name"],
            tuple(entry["prompt_ids"]),
            tuple(entry["output_ids"]),
            entry["output_text"],
            entry["least_margin"],
        )
        for entry in data["prompts"]
    )
