"""Configuration is refused where it cannot be meant, with the name that was."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load_config, parse_config
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
            r"Expected `int`, got `str` - at `\$.kv_cache.num_blocks`",
        ),
        ("kv_cache: 3", "kv_cache must be a mapping"),
        ("dtype: float8", "Invalid enum value"),
        ("- a", "the file must be a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what) as caught:
        load_config(path, EngineConfig)
    assert str(path) in str(caught.value)


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
