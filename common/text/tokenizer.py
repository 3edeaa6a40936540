"""Token ids from text and back, from a Hugging Face folder or a GGUF file.

Everything runs on `tokenizers`; neither torch, transformers nor gguf is
imported. A Tokenizer does not change after it is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from common.gguf_header import read_gguf_header
from common.model_files import (
    folder_eos_token_ids,
    gguf_eos_token_ids,
    is_gguf,
    read_json,
    require_model_path,
    token_text,
)
from common.text.chat_template import ChatTemplate, pick_template
from protos.errors import ConfigError, InvalidRequestError
from protos.messages import ChatMessage

REPLACEMENT = "\ufffd"
"""What `decode` says for bytes that are no whole character."""
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True)
class BosRule:
    """What `encode` adds around a text. None: what tokenizer.json's post-processor adds."""

    add_bos: bool | None = None
    add_eos: bool = False
    bos_id: int | None = None
    eos_id: int | None = None


class Tokenizer:
    """Encodes prompts and chats, decodes answers."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        bos_rule: BosRule | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._bos_rule = bos_rule or BosRule()
        self._chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._pieces: dict[int, str | None] = {}
        """Of the tokens that came so far; at most one for each token of the vocabulary."""
        self._joins_bytes = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's ids, with BOS and the like only where the model's files say so."""
        rule = self._bos_rule
        ids = tuple(self._backend.encode(text, add_special_tokens=rule.add_bos is None).ids)
        if rule.add_bos and rule.bos_id is not None:
            ids = (rule.bos_id, *ids)
        if rule.add_eos and rule.eos_id is not None:
            ids = (*ids, rule.eos_id)
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """A chat's ids, up to where the assistant's answer starts.

        Raises InvalidRequestError where the model has no chat template or the
        template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template; send text or token ids", field="messages"
            )
        prompt = self._chat_template.render(messages)
        # The template writes BOS itself.
        return tuple(self._backend.encode(prompt, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `decode` leaves out."""
        return token_id in self._special_ids

    def piece(self, token_id: int) -> str | None:
        """The token's text where it is whole characters that no neighbour can change.

        None for other tokens, and for all where `decode` does more than join bytes
        (a SentencePiece model's first word loses its leading space).
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._find_piece(token_id)
            if token_id < self.vocab_size:
                self._pieces[token_id] = piece
            return piece

    def _find_piece(self, token_id: int) -> str | None:
        if not self._joins_bytes or self.is_special(token_id):
            return None
        text = self.decode((token_id,))
        return None if REPLACEMENT in text or not text else text


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises ConfigError where the files are missing, broken or of an unknown kind."""
    require_model_path(path)
    if is_gguf(path):
        return _from_gguf(path)
    return _from_folder(path)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json (slow tokenizers are not supported)",
            field="model",
            value=str(folder),
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ConfigError(f"cannot read {file}: {error}", field="model", value=str(file)) from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = {
        key: text for key in SPECIAL_TOKEN_KEYS if (text := token_text(config.get(key)))
    }
    _mark_special(backend, special_tokens)
    return Tokenizer(
        backend,
        eos_token_ids=folder_eos_token_ids(folder),
        bos_rule=_folder_bos_rule(backend, config, special_tokens),
        chat_template=_folder_chat_template(folder, config, special_tokens),
    )


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json calls special are left out of text too."""
    known = [text for text in special_tokens.values() if backend.token_to_id(text) is not None]
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in known]
    )


def _folder_bos_rule(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> BosRule:
    if config.get("add_bos_token") is None:
        return BosRule()
    return BosRule(
        add_bos=bool(config["add_bos_token"]),
        add_eos=bool(config.get("add_eos_token")),
        bos_id=backend.token_to_id(special_tokens.get("bos_token", "")),
        eos_id=backend.token_to_id(special_tokens.get("eos_token", "")),
    )


def _folder_chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        source: str | None = file.read_text(encoding="utf-8")
    else:
        source = pick_template(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens)


def _from_gguf(path: Path) -> Tokenizer:
    from common.text import gguf_tokenizer

    metadata = read_gguf_header(path).metadata
    special_tokens = gguf_tokenizer.special_tokens(metadata)
    source = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        gguf_tokenizer.build(metadata),
        eos_token_ids=gguf_eos_token_ids(metadata),
        bos_rule=BosRule(
            add_bos=gguf_tokenizer.adds_bos(metadata),
            add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        ),
        chat_template=None if source is None else ChatTemplate(str(source), special_tokens),
    )
