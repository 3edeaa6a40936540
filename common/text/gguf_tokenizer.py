"""A `tokenizers` tokenizer out of a GGUF file's metadata.

GGUF holds the vocabulary, the merges (or scores) and the *name* of the
pre-tokenizer only; what each name means is written down here. A name that is
not known is refused: a wrong split gives wrong ids without a sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from protos.errors import ConfigError

KIND_UNKNOWN, KIND_CONTROL, KIND_USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + _REST % r"\p{N}{1,3}"
QWEN2_PATTERN = _CONTRACTIONS + _REST % r"\p{N}"

SPACE_MARK = "▁"


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ConfigError for a tokenizer model or pre-tokenizer it does not know."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ConfigError(
            f"GGUF tokenizer model {model!r} is not supported",
            field="tokenizer.ggml.model",
            value=model,
            limit="gpt2, llama",
        )
    _add_tokens(tokenizer, metadata)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that chat templates name."""
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """The file's word, else the habit of the tokenizer's kind."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    is_llama3 = metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    return metadata.get("tokenizer.ggml.model") == "llama" or is_llama3


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    is_llama3 = name in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=is_llama3,
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return plain
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    patterns = {
        "llama-bpe": LLAMA3_PATTERN,
        "llama3": LLAMA3_PATTERN,
        "llama-v3": LLAMA3_PATTERN,
        "qwen2": QWEN2_PATTERN,
    }
    if name not in patterns:
        raise ConfigError(
            f"GGUF pre-tokenizer {name!r} is not supported",
            field="tokenizer.ggml.pre",
            value=name,
            limit=", ".join(["default", "gpt-2", "smollm", *patterns]),
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: the pair that makes the best scored piece is joined first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == KIND_UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_by_score(tokens, metadata["tokenizer.ggml.scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    mark = [normalizers.Replace(" ", SPACE_MARK)]
    prefix = [normalizers.Prepend(SPACE_MARK)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, *mark])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, str, str]] = []
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[i], i, left, right))
    merges.sort(key=lambda merge: (merge[0], merge[1], ids[merge[2]], ids[merge[3]]))
    return [(left, right) for _, _, left, right in merges]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    typed = list(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    )
    # <unk> is special too: it is never written by users and never shown.
    control = [token for token, kind in typed if kind in (KIND_CONTROL, KIND_UNKNOWN)]
    user = [token for token, kind in typed if kind == KIND_USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
