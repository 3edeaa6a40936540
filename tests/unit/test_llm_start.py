"""What an LLM says before its engine starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton import LLM, demo_model
from baton.llm_start import model_of
from protos.errors import ConfigError


def test_a_working_directory_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a FileNotFoundError without a name, or torch's word for a missing library."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        with pytest.raises(ConfigError, match="working directory cannot be used"):
            LLM(engine="scripted")
    finally:
        os.chdir(tmp_path)


def test_demo_names_the_demo_model_as_it_does_for_baton_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo_model, "demo_model_folder", lambda **_: Path("/cache/demo"))
    assert model_of("demo", None) == "/cache/demo"
    assert model_of(Path("/a/model"), None) == "/a/model"


def test_a_wrong_path_is_told_of_the_demo_model() -> None:
    with pytest.raises(ConfigError, match=r"`baton model demo` prints one"):
        LLM("/no/model")
