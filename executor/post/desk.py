"""A postprocess worker's table: one Postprocessor per request it was told of. Pure.

A request is opened once, before its first output, and forgotten with its last
one, or when the frontend says that it ended otherwise. An output for a request
that is not (or no longer) open is late: counted, dropped, its lease told.
"""

from __future__ import annotations

import msgspec

from common.text.detokenizer import Decoder
from executor.answer import ResultChunk
from executor.engine.seam import EngineOutput
from executor.post.messages import (
    Answer,
    Counts,
    Lease,
    Orphan,
    PostChunk,
    Work,
    lease_of,
    unpack_outputs,
)
from executor.postprocess import Postprocessor
from protos.errors import ErrorData, RequestFailedError, describe, shorten

WORDS_LENGTH_MAX = 500


class Desk:
    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._open: dict[int, Postprocessor] = {}
        self._num_late = 0
        self._num_malformed = 0

    def __len__(self) -> int:
        return len(self._open)

    def handle(self, work: Work, num_bad_frames: int = 0) -> Answer:
        draft = _Draft()
        self._update(work, draft)
        for output in self._outputs(work.payloads):
            self._absorb(output, draft)
        return Answer(
            number=work.number,
            chunks=tuple(draft.chunks),
            failed=tuple(draft.failed),
            leases=tuple(draft.leases),
            orphans=tuple(draft.orphans),
            num_dropped_tokens=draft.num_dropped,
            counts=Counts(len(self._open), self._num_late, self._num_malformed, num_bad_frames),
        )

    def check(self) -> None:
        """Raises AssertionError where an entry should be gone, or is broken."""
        for text in self._open.values():
            text.check()

    def _update(self, work: Work, draft: _Draft) -> None:
        for client_id, params in work.opened:
            try:
                self._open[client_id] = Postprocessor(params, self._tokenizer)
            except Exception as error:  # the tokenizer's own, of whatever type
                draft.fail(client_id, error)
        for client_id in work.forgotten:
            text = self._open.pop(client_id, None)
            if text is not None:
                draft.num_dropped += text.num_dropped

    def _outputs(self, payloads: tuple[bytes, ...]) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for payload in payloads:
            try:
                outputs.extend(unpack_outputs(payload))
            except msgspec.MsgspecError:  # authentic, so another version of us
                self._num_malformed += 1
        return outputs

    def _absorb(self, output: EngineOutput, draft: _Draft) -> None:
        client_id = output.request_id
        text = self._open.get(client_id)
        if text is None:
            self._num_late += 1
            draft.add_orphan(output)
            return
        try:
            chunk = text.absorb(output)
        except Exception as error:
            del self._open[client_id]
            draft.fail(client_id, error)
            draft.add_orphan(output)
            draft.num_dropped += text.num_dropped
            return
        if chunk is not None:
            draft.chunks.append(_to_post(client_id, chunk, text.stop_string))
        if output.finish is not None:
            del self._open[client_id]
            draft.num_dropped += text.num_dropped
            if text.lease_to_release is not None:
                draft.leases.append(lease_of(text.lease_to_release))


class _Draft:
    """An answer in the making."""

    def __init__(self) -> None:
        self.chunks: list[PostChunk] = []
        self.failed: list[tuple[int, ErrorData]] = []
        self.leases: list[Lease] = []
        self.orphans: list[Orphan] = []
        self.num_dropped = 0

    def fail(self, client_id: int, error: Exception) -> None:
        message = f"postprocessing failed: {describe(error)}"
        message = shorten(message, WORDS_LENGTH_MAX)
        self.failed.append((client_id, RequestFailedError(message).to_data()))

    def add_orphan(self, output: EngineOutput) -> None:
        params = output.finish.context_phase_params if output.finish is not None else None
        if params is not None:
            self.orphans.append(Orphan(output.request_id, lease_of(params)))


def _to_post(client_id: int, chunk: ResultChunk, stop_string: str) -> PostChunk:
    return PostChunk(
        client_id,
        chunk.token_index,
        chunk.token_ids,
        chunk.text,
        chunk.text_offset,
        chunk.finish,
        stop_string,
    )
