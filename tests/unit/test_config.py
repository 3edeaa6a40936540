"""Configuration is refused where it cannot be meant, with the name that was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta

from common.config import ConfigStruct, load_config, parse_config
from executor.config import EngineConfig
from protos.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("modle: x", "unknown key 'modle'; did you mean 'model'"),
        ("kv_cache: {num_block: 3}", "unknown key 'kv_cache.num_block'; did you mean 'num_blocks'"),
        ("zzz: 1", "known keys are model"),
        (
            "kv_cache: {num_blocks: many}",
            "key 'kv_cache.num_blocks' is 'many'; it must be an integer",
        ),
        ("kv_cache: 3", "key 'kv_cache' is 3; it must be a mapping"),
        ("kv_cache:", "key 'kv_cache' is empty; it must be a mapping"),
        ("dtype: float8", "key 'dtype' is 'float8'; it must be one of float32, bfloat16"),
        ("- a", r"the file is \['a'\]; it must be a mapping"),
        (
            "scripted: {eos_token_ids: [1, x]}",
            r"key 'scripted.eos_token_ids\[1\]' is 'x'; it must be an integer",
        ),
        ("a: [", "not valid YAML"),
        ("kv_cache: {num_blocks: 1, num_blocks: 2}", "key 'num_blocks' is given twice"),
        ("model: 2026-99-99", "not valid YAML: month must be in 1..12"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what) as caught:
        load_config(path, EngineConfig)
    assert str(path) in str(caught.value)


class Wanting(ConfigStruct, frozen=True, kw_only=True):
    name: str
    share: Annotated[float, Meta(ge=0, le=600)] = 0.5
    limit: int | None = None
    pools: dict[str, EngineConfig] = {}  # noqa: RUF012 - msgspec copies it


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({}, "key 'name' is missing; it must be text"),
        ({"name": "a", "share": -1}, "key 'share' is -1; it must be a number, at least 0, at most"),
        ({"name": "a", "limit": "x"}, "key 'limit' is 'x'; it must be an integer or empty"),
        ({"name": True}, "key 'name' is true; it must be text"),
        ({"name": "a", "pools": {"b": {"dtype": 3}}}, "key 'pools.b.dtype' is 3; it must be one"),
        ({"name": "a", "pools": {"b": {"dtyp": 3}}}, "unknown key 'pools.b.dtyp'; did you mean"),
    ],
)
def test_a_refused_value_names_its_key_and_what_it_must_be(data: Any, what: str) -> None:
    """msgspec's own "Invalid enum value 'x' - at `$.dtype`" told nobody what was allowed."""
    with pytest.raises(ConfigError, match=what) as caught:
        parse_config(data, Wanting, "test")
    assert caught.value.field
    assert caught.value.limit


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read configuration"):
        load_config(tmp_path / "none.yaml", EngineConfig)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing\n")
    assert load_config(path, EngineConfig) == EngineConfig()


def test_given_values_arrive() -> None:
    config = parse_config({"kv_cache": {"num_blocks": 8}}, EngineConfig, "test")
    assert config.kv_cache.num_blocks == 8
    assert config.kv_cache.tokens_per_block == 16
