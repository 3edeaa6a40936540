"""Tokenizers out of folders and GGUF files: ids, BOS, end tokens, chat templates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers, processors

from common.text import gguf_tokenizer
from common.text.tokenizer import load_tokenizer
from protos.errors import ConfigError, InvalidRequestError
from protos.messages import ChatMessage
from tests.support.text_toys import (
    byte_level_backend,
    sentencepiece_backend,
    write_folder,
    write_gguf_tokenizer,
)

SAMPLES = [
    "the quick brown fox",
    "  12  345\r\n x\t",
    "It's what THEY'LL say — naïve 你好 😀",
    "<s>special</s> inside",
    "",
    " ",
]
CHAT = [ChatMessage("user", 'hi "😀"')]


def folder_with_template(tmp_path: Path, template: Any, **config: Any) -> Path:
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    return write_folder(
        tmp_path / "model", byte_level_backend(), {**settings, "chat_template": template}
    )


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer"),
    [
        ("default", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
        (
            "qwen2",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(gguf_tokenizer.QWEN2_PATTERN), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        ),
    ],
)
def test_byte_level_gguf_equals_its_folder(
    tmp_path: Path, pre: str, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> None:
    """A pre-tokenizer that is read wrongly splits digits and spaces otherwise."""
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizer
    folder = load_tokenizer(write_folder(tmp_path / "hf", backend))
    gguf = load_tokenizer(
        write_gguf_tokenizer(tmp_path / "m.gguf", backend, model="gpt2", pre=pre, eos_token_id=1)
    )
    for text in SAMPLES:
        assert gguf.encode(text) == folder.encode(text)
        assert gguf.decode(gguf.encode(text)) == folder.decode(folder.encode(text))
    assert gguf.eos_token_ids == (1,)
    assert gguf.vocab_size == folder.vocab_size


def test_sentencepiece_gguf_equals_its_folder(tmp_path: Path) -> None:
    """Merges are derived from scores; a wrong order gives other pieces."""
    backend = sentencepiece_backend()
    folder = load_tokenizer(write_folder(tmp_path / "hf", backend))
    path = write_gguf_tokenizer(
        tmp_path / "m.gguf", backend, model="llama", pre="default", add_bos_token=False
    )
    gguf = load_tokenizer(path)
    for text in [*SAMPLES, *(f"{a} {b}" for a in SAMPLES for b in SAMPLES)]:
        assert gguf.encode(text) == folder.encode(text)
        assert gguf.decode(gguf.encode(text)) == folder.decode(folder.encode(text))


def test_llama3_gguf_adds_bos_unless_told_otherwise(tmp_path: Path) -> None:
    """llama.cpp adds BOS for this kind where the file is silent."""
    backend = byte_level_backend()
    silent = write_gguf_tokenizer(
        tmp_path / "a.gguf", backend, model="gpt2", pre="llama-bpe", bos_token_id=0
    )
    told = write_gguf_tokenizer(
        tmp_path / "b.gguf",
        backend,
        model="gpt2",
        pre="llama-bpe",
        bos_token_id=0,
        add_bos_token=False,
    )
    assert load_tokenizer(silent).encode("the") == (0, *load_tokenizer(told).encode("the"))


@pytest.mark.parametrize(
    ("model", "pre", "named"), [("bert", "default", "bert"), ("gpt2", "tekken", "tekken")]
)
def test_unknown_gguf_tokenizer_is_refused_by_name(
    tmp_path: Path, model: str, pre: str, named: str
) -> None:
    """A guess would give wrong ids without a sound."""
    path = write_gguf_tokenizer(tmp_path / "m.gguf", byte_level_backend(), model="gpt2", pre=pre)
    metadata = {"tokenizer.ggml.model": model}
    with pytest.raises(ConfigError, match=named):
        gguf_tokenizer.build(metadata) if model != "gpt2" else load_tokenizer(path)


def test_qwen2_pattern_splits_digits_one_by_one_and_llama3_by_three() -> None:
    def split(pattern: str, text: str) -> list[str]:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        return [piece for piece, _ in splitter.pre_tokenize_str(text)]

    text = "I'll pay 12345 now!\n\n ok"
    common_end = [" now", "!\n\n", " ok"]
    head = ["I", "'ll", " pay", " "]
    assert split(gguf_tokenizer.LLAMA3_PATTERN, text) == [*head, "123", "45", *common_end]
    assert split(gguf_tokenizer.QWEN2_PATTERN, text) == [*head, *"12345", *common_end]


@pytest.mark.parametrize(
    ("stated", "has_processor", "expected"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_bos_is_added_where_the_files_say_so(
    tmp_path: Path, stated: bool | None, has_processor: bool, expected: bool
) -> None:
    """tokenizer_config.json's word goes before tokenizer.json's post-processor; never two BOS."""
    backend = byte_level_backend()
    if has_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    config = {"bos_token": "<s>"} | ({} if stated is None else {"add_bos_token": stated})
    ids = load_tokenizer(write_folder(tmp_path, backend, config)).encode("the fox")
    assert ids.count(0) == int(expected)
    assert (ids[0] == 0) == expected


def test_all_end_tokens_are_found(tmp_path: Path) -> None:
    """A chat model that runs on past its end-of-turn token is the classic bug."""
    folder = write_folder(tmp_path, byte_level_backend(), {"eos_token": {"content": "</s>"}})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_tokenizer(folder).eos_token_ids == (7, 9, 1)


@pytest.mark.parametrize("form", ["string", "mapping", "list", "file"])
def test_chat_template_in_each_form(tmp_path: Path, form: str) -> None:
    template = (
        "{% for m in messages %}\n"
        "    {% generation %}{{ bos_token }}{{ m['role'] }}:{{ m.content | tojson }}"
        "{% endgeneration %}\n{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    forms: dict[str, Any] = {
        "string": template,
        "mapping": {"tool_use": "no", "default": template},
        "list": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}],
        "file": "no",
    }
    folder = folder_with_template(tmp_path, forms[form])
    if form == "file":
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_chat(CHAT)
    assert ids[0] == 0
    assert tokenizer.decode(ids).replace("\n", "") == r'user:"hi \"😀\""!'


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at.all }}", "no attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_template_that_misbehaves_refuses_the_request(
    tmp_path: Path, template: str, reason: str
) -> None:
    """Whatever a template raises must end one request, not the server."""
    tokenizer = load_tokenizer(folder_with_template(tmp_path, template))
    with pytest.raises(InvalidRequestError, match=reason):
        tokenizer.encode_chat(CHAT)


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend()))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat(CHAT)


def test_special_only_by_tokenizer_config_is_not_shown(tmp_path: Path) -> None:
    """Some folders name their end token in tokenizer_config.json alone."""
    backend = byte_level_backend()
    plain = next(t for t, i in backend.get_vocab().items() if i == 300)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, {"eos_token": plain}))
    assert tokenizer.decode([300]) == ""
    assert tokenizer.is_special(300)


@pytest.mark.parametrize("broken", ["absent", "no_tokenizer", "bad_json", "bad_template", "gguf"])
def test_broken_files_are_configuration_errors(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "model"
    if broken in ("no_tokenizer", "bad_json"):
        path.mkdir()
        (path / "config.json").write_text("{}")
    if broken == "bad_json":
        (path / "tokenizer.json").write_text("{")
    if broken == "bad_template":
        path = folder_with_template(tmp_path, "{% for %}")
    if broken == "gguf":
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ConfigError):
        load_tokenizer(path)


def test_folder_path_imports_no_heavy_module(tmp_path: Path) -> None:
    """The router tokenises: it must start without torch, transformers or gguf."""
    folder = write_folder(tmp_path, byte_level_backend())
    code = (
        "import sys, pathlib; from common.text.tokenizer import load_tokenizer;"
        "import common.text.stream; load_tokenizer(pathlib.Path(sys.argv[1]));"
        "print([m for m in ('torch', 'transformers', 'gguf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    """Some tokenizer.json files were saved with truncation on: prompts would lose their end."""
    backend: tokenizers.Tokenizer = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert 2 < len(tokenizer.encode("the quick brown fox")) < 50
