"""One answer's text stream: detokenising, stop strings, offsets.

    streaming ── push ──> streaming
        │  ├── a stop string is complete ──> stopped (later tokens count nothing)
        │  └── finish ──> finished (held text is flushed)
        └── replay: as push, but the text was streamed by another server

A server that takes over rebuilds its state with `replay`; from there on it
emits what an unbroken stream would have emitted, also for a character or a stop
string that lies across the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.text.detokenizer import Decoder, IncrementalDetokenizer
from common.text.stops import StopMatcher


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text that may be shown now.

    `text_offset` is where it starts in the answer, in code points. `num_tokens`
    says how many of the pushed ids belong to the answer: all, or up to and
    including the one that completed `stop_string`.
    """

    text: str
    text_offset: int
    stop_string: str | None
    num_tokens: int


class TextStream:
    def __init__(
        self, tokenizer: Decoder, prompt_token_ids: Sequence[int], stop: tuple[str, ...]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._matcher = StopMatcher(stop)
        self._is_finished = False
        self.text_length = 0
        """Code points emitted so far."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that these tokens made certain."""
        assert not self._is_finished, "push after finish"
        pieces: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            pieces.append(self._matcher.push(self._detokenizer.push(token_id)))
            num_tokens += 1
        return self._emit("".join(pieces), num_tokens)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take over after these tokens: their text was emitted elsewhere."""
        self.push(token_ids)

    def finish(self) -> TextDelta:
        """What was held back, now that no more tokens come."""
        assert not self._is_finished, "finish twice"
        self._is_finished = True
        text = self._matcher.push(self._detokenizer.finish())
        return self._emit(text + self._matcher.finish(), 0)

    def check(self) -> None:
        self._detokenizer.check()
        self._matcher.check()

    def _emit(self, text: str, num_tokens: int) -> TextDelta:
        offset = self.text_length
        self.text_length += len(text)
        return TextDelta(text, offset, self._matcher.matched, num_tokens)
