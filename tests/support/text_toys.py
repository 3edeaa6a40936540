"""Small tokenizers of the two great kinds, made in the test: byte level and SentencePiece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from common.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog again and again",
    "streams of tokens are streams of bytes; naïve cafés cost 12 345 €",
    "It's what they'll say: we've 3 dogs, I'm sure.\n\n  def f(x):\n    return x",
    "你好，世界 😀 🎉 émigré — “quotes”",
] * 3

SPECIALS = ["<s>", "</s>"]


def byte_level_backend(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """GPT-2's kind: ids 0 and 1 are special, every byte has a token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


class ByteTokenizer:
    """Without merges: most characters need several tokens. Made anew in every process."""

    def __init__(self) -> None:
        self._backend = byte_level_backend(vocab_size=258)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def is_special(self, token_id: int) -> bool:
        return token_id < 2

    def piece(self, token_id: int) -> str | None:
        return None


def sentencepiece_backend(vocab_size: int = 420) -> tokenizers.Tokenizer:
    """Llama 2's kind: a leading space mark, byte tokens for unknown characters."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = _space_marks()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", *SPECIALS, *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = _space_marks()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ["<unk>", *SPECIALS]]
    )
    return backend


def toy(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, eos_token_ids=())


def write_folder(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None
) -> Path:
    """A Hugging Face folder with this tokenizer and an empty config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def write_gguf_tokenizer(
    path: Path, backend: tokenizers.Tokenizer, *, model: str, pre: str, **extra: Any
) -> Path:
    """A GGUF file with this vocabulary: merges for "gpt2", scores for "llama"."""
    import gguf

    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([_kind(token) for token, _ in vocab])
    if model == "gpt2":
        writer.add_token_merges([f"{left} {right}" for left, right in merges])
    else:
        ranks = {
            left + right: -float(rank) for rank, (left, right) in reversed([*enumerate(merges)])
        }
        writer.add_token_scores([ranks.get(token, -1e6) for token, _ in vocab])
    for name, value in extra.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _space_marks() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _kind(token: str) -> int:
    if token == "<unk>":
        return 2
    if token in SPECIALS:
        return 3
    return 6 if token.startswith("<0x") else 1
