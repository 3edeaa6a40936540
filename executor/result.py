"""A request's answer, as its consumer reads it.

Life: chunks are pushed and read; then exactly one end, `finish` in the last
chunk or an error, which every later read raises again. What a slow consumer has
not read is kept as one merged chunk, so it costs no more than the answer itself
and slows nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from executor.engine.seam import EngineFinish
from protos.errors import BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultChunk:
    """`text` may lag behind `token_ids`: half characters and half stop strings wait."""

    token_index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_offset: int = 0
    finish: EngineFinish | None = None
    stop_string: str = ""


class GenerationResult:
    """An async iterator of ResultChunk for one consumer. Lives on the event loop's thread."""

    def __init__(self, client_id: int, abort: Callable[[int], None]) -> None:
        self.client_id = client_id
        self._abort = abort
        self._first: ResultChunk | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._last: ResultChunk | None = None
        self._error: BatonError | None = None
        self._is_finished = False
        self._waiter: asyncio.Future[None] | None = None
        self.num_merged = 0

    @property
    def is_ended(self) -> bool:
        """Whether the end is known, read or not."""
        return self._is_finished or self._error is not None

    def abort(self) -> None:
        """Ask for the request's end; it comes as RequestCancelledError. Harmless later."""
        self._abort(self.client_id)

    def push(self, chunk: ResultChunk) -> None:
        assert not self.is_ended, "a second answer"
        if self._first is None:
            self._first = chunk
        else:
            self.num_merged += 1
        self._token_ids.extend(chunk.token_ids)
        self._texts.append(chunk.text)
        self._last = chunk
        self._is_finished = chunk.finish is not None
        self._wake()

    def fail(self, error: BatonError) -> None:
        """What was pushed before is still read first."""
        assert not self.is_ended, "a second answer"
        self._error = error
        self._wake()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> ResultChunk:
        while self._first is None:
            if self._error is not None:
                raise self._error
            if self._is_finished:
                raise StopAsyncIteration
            await self._wait()
        return self._take()

    async def _wait(self) -> None:
        assert self._waiter is None, "a result has one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> ResultChunk:
        first, last = self._first, self._last
        assert first is not None
        assert last is not None
        token_ids, texts = tuple(self._token_ids), "".join(self._texts)
        self._first = self._last = None
        self._token_ids, self._texts = [], []
        return ResultChunk(
            token_index=first.token_index,
            token_ids=token_ids,
            text=texts,
            text_offset=first.text_offset,
            finish=last.finish,
            stop_string=last.stop_string,
        )
