"""Text out of token ids as they come, never half a character.

    window = [context: tokens whose text is out][pending: tokens whose text is not]

A token's text depends on its neighbours (bytes that make a character together,
a leading space that only the first word loses), so a short window is decoded,
not the token alone, and what is out already is cut off in front. While the
window's text ends with U+FFFD its last character may be incomplete: that run
waits. Once all is out, the pending tokens become the next context. A model
that emits bytes which never become text cannot make the window grow: beyond
PENDING_MAX tokens all but the last three characters go out as they are (a
UTF-8 sequence lacks at most its last byte: three).

Most tokens of byte-level tokenizers hold whole characters and look the same
wherever they stand: such a piece needs no decoding while nothing waits.

Special tokens are dropped at the door, as `Tokenizer.decode` drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONTEXT_TOKENS = 8
PENDING_MAX = 24
INCOMPLETE_MAX = 3
REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def piece(self, token_id: int) -> str | None:
        """The token's text where it is whole characters that no neighbour can change."""


class IncrementalDetokenizer:
    """One answer's text. The prompt is context: its text is not emitted."""

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._window = visible_tail(decoder, prompt_token_ids)
        self._num_context = len(self._window)
        context = decoder.decode(self._window) if self._window else ""
        # Where the prompt ends amid a character, the whole character is the answer's.
        waiting = _incomplete_length(context)
        self._emitted = len(context) - waiting
        self._has_waiting = waiting > 0

    def push(self, token_id: int) -> str:
        """The text that this token completed; empty while a character lacks bytes."""
        if not self._has_waiting:
            piece = self._decoder.piece(token_id)
            if piece is not None:
                self._window, self._num_context, self._emitted = [token_id], 1, len(piece)
                return piece
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        if self._decoder.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        waiting = _incomplete_length(text)
        start = self._emitted
        self._has_waiting = waiting > 0
        if waiting and len(self._window) - self._num_context < PENDING_MAX:
            self._emitted = max(start, len(text) - waiting)
            return text[start : self._emitted]
        waiting = min(waiting, INCOMPLETE_MAX)
        self._slide(waiting)
        return text[start : len(text) - waiting]

    def finish(self) -> str:
        """The rest, U+FFFD for a character that stayed incomplete."""
        text = self._decoder.decode(self._window) if self._window else ""
        rest = text[self._emitted :]
        self._emitted = len(text)
        return rest

    def check(self) -> None:
        assert 0 <= self._num_context <= CONTEXT_TOKENS
        assert self._num_context <= len(self._window) < CONTEXT_TOKENS + PENDING_MAX
        assert self._emitted >= 0
        if not self._has_waiting:
            assert len(self._window) == self._num_context

    def _slide(self, waiting: int) -> None:
        """Pending tokens become context, but for `waiting` characters at the end."""
        self._window = self._window[self._num_context :][-CONTEXT_TOKENS:]
        self._num_context = len(self._window)
        self._emitted = len(self._decoder.decode(self._window)) - waiting


def visible_tail(decoder: Decoder, token_ids: Sequence[int]) -> list[int]:
    """The last tokens that have text, or fewer: what the detokenizer needs of a prompt."""
    tail: list[int] = []
    for token_id in reversed(token_ids):
        if len(tail) == CONTEXT_TOKENS:
            break
        if not decoder.is_special(token_id):
            tail.append(token_id)
    return tail[::-1]


def _incomplete_length(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT))
