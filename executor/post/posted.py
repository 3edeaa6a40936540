"""A request's text as its books see it while a postprocess worker makes it.

Fed with the worker's chunks, in order, it knows enough to end the request without
the worker: a stop string was complete, the engine was told to stop, and its last
word (an error, which comes past the worker) brings the usage of a STOP.
"""

from __future__ import annotations

from executor.answer import ResultChunk
from executor.engine.seam import EngineOutput
from executor.post.messages import PostChunk
from executor.postprocess import TextParams, stopped_finish
from protos.errors import InternalError
from protos.messages import ContextPhaseParams


class PostedText:
    """Stands where a Postprocessor stands for text that is made here."""

    def __init__(self, params: TextParams) -> None:
        self._num_prompt_tokens = params.num_prompt_tokens
        self._num_first = len(params.first_token_ids)
        self._next_index = self._num_first
        self._text_length = 0
        self.stop_string = ""
        self.num_dropped = 0
        self.lease_to_release: ContextPhaseParams | None = None

    @property
    def is_stopped(self) -> bool:
        return bool(self.stop_string)

    def take(self, chunk: PostChunk) -> ResultChunk:
        """What the consumer reads of it."""
        self._next_index = chunk.token_index + len(chunk.token_ids)
        self._text_length = chunk.text_offset + len(chunk.text)
        self.stop_string = chunk.stop_string
        return ResultChunk(
            token_index=chunk.token_index,
            token_ids=chunk.token_ids,
            text=chunk.text,
            text_offset=chunk.text_offset,
            finish=chunk.finish,
            stop_string=chunk.stop_string if chunk.finish is not None else "",
        )

    def absorb(self, output: EngineOutput) -> ResultChunk:
        """The engine's last word after a stop string. Raises InternalError for any other."""
        if not self.is_stopped or output.error is None:
            raise InternalError("tokens came past the postprocess worker")
        if output.finish is not None:
            self.lease_to_release = output.finish.context_phase_params
        finish = stopped_finish(
            output.finish,
            num_prompt_tokens=self._num_prompt_tokens,
            num_streamed=self._next_index - self._num_first,
        )
        return ResultChunk(
            token_index=self._next_index,
            text_offset=self._text_length,
            finish=finish,
            stop_string=self.stop_string,
        )
