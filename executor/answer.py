"""What has come of one answer, and how much of that was read. Pure; the lock is its user's.

    unread ── take ──> read            (one place, moved by every reader)

Everything is kept once, as four bytes a token and joined pieces of text; what
is unread is the part behind the place. A reader that keeps up gets the very
chunk that came, one that fell behind gets all that it missed as one.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from executor.engine.local import LocalOutput, Logits
from executor.engine.seam import EngineFinish
from protos.completion import Completion, Timing

if TYPE_CHECKING:
    from executor.request import ExecutorRequest

TEXT_PIECES_MAX = 256
"""More are joined: a string object costs far more than the few characters of a token."""


class ResultChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`text` may lag behind `token_ids`: half characters and half stop strings wait."""

    token_index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_offset: int = 0
    finish: EngineFinish | None = None
    stop_string: str = ""


class Answer:
    __slots__ = (
        "_logits",
        "_num_read",
        "_num_read_pieces",
        "_pieces",
        "_token_ids",
        "first_unread",
        "last",
        "num_merged",
    )

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._pieces: list[str] = []
        self._logits: list[LocalOutput] = []
        self._num_read = 0
        self._num_read_pieces = 0
        self.first_unread: ResultChunk | None = None
        self.last: ResultChunk | None = None
        """The newest chunk, read or not; the one with `finish` in the end."""
        self.num_merged = 0

    @property
    def num_unread_tokens(self) -> int:
        return len(self._token_ids) - self._num_read

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, chunk: ResultChunk) -> None:
        if chunk.token_ids:
            self._token_ids.extend(chunk.token_ids)
        if chunk.text:
            self._pieces.append(chunk.text)
            if len(self._pieces) > TEXT_PIECES_MAX:
                self._join_pieces()
        if self.first_unread is None:
            self.first_unread = chunk
        else:
            self.num_merged += 1
        self.last = chunk

    def take(self) -> ResultChunk:
        """All that is unread; asked where there is something."""
        first, last = self.first_unread, self.last
        assert first is not None
        assert last is not None
        chunk = first
        if first is not last:
            chunk = ResultChunk(
                token_index=first.token_index,
                token_ids=tuple(self._token_ids[self._num_read :]),
                text="".join(self._pieces[self._num_read_pieces :]),
                text_offset=first.text_offset,
                finish=last.finish,
                stop_string=last.stop_string,
            )
        self.first_unread = None
        self._num_read = len(self._token_ids)
        self._num_read_pieces = len(self._pieces)
        return chunk

    def add_logits(self, logits: LocalOutput) -> int:
        """Before the chunk that they belong to. The bytes they take, as long as this lives."""
        self._logits.append(logits)
        arrays = (logits.context_logits, logits.generation_logits)
        return sum(array.nbytes for array in arrays if array is not None)

    def completion(self, request: ExecutorRequest | None, timing: Timing) -> Completion:
        """Of an answer that has finished."""
        last, token_ids = self.last, self.token_ids
        assert last is not None
        finish = last.finish
        assert finish is not None
        return Completion(
            text=self.text,
            token_ids=token_ids,
            finish_reason=finish.reason,
            usage=finish.usage,
            kv=finish.kv,
            timing=timing,
            external_id="" if request is None else request.external_id,
            seed=0 if request is None else request.sampling.seed or 0,
            stop_string=last.stop_string,
            stop_token_id=finish.stop_token_id,
            prompt_token_ids=() if request is None else request.prompt_token_ids,
            context_phase_params=finish.context_phase_params,
            context_logits=_joined([item.context_logits for item in self._logits]),
            generation_logits=_joined([item.generation_logits for item in self._logits], token_ids),
        )

    def check(self) -> None:
        """Raises AssertionError where the parts do not agree."""
        assert 0 <= self._num_read <= len(self._token_ids)
        assert 0 <= self._num_read_pieces <= len(self._pieces) <= TEXT_PIECES_MAX
        if self.first_unread is None:
            assert self.num_unread_tokens == 0
            assert self._num_read_pieces == len(self._pieces)

    def _join_pieces(self) -> None:
        """All that was read becomes one piece, all that was not another."""
        cut = self._num_read_pieces
        self._pieces = ["".join(self._pieces[:cut]), "".join(self._pieces[cut:])]
        self._num_read_pieces = 1


def _joined(parts: list[Logits | None], token_ids: tuple[int, ...] | None = None) -> Logits | None:
    """As one array; rows of tokens that a stop string cut off are none of the answer's."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    joined = np.concatenate(given)
    return joined if token_ids is None else joined[: len(token_ids)]
