"""From engine outputs to the chunks a consumer reads: text, stop strings, the right end.

One `Postprocessor` per request, fed in order. When a stop string is complete
the answer is: what comes later is dropped and counted, the engine's request is
aborted by the caller, and the engine's last output (whatever it says) only
brings the usage and times of a STOP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from common.text.detokenizer import visible_tail
from common.text.stream import TextDelta, TextStream
from executor.engine.seam import EngineFinish, EngineOutput
from executor.request import ExecutorRequest
from executor.result import ResultChunk
from protos.errors import InternalError, InvalidRequestError
from protos.messages import ContextPhaseParams, FinishReason, RequestType, Usage

if TYPE_CHECKING:
    from common.text.detokenizer import Decoder


class TextParams(msgspec.Struct, frozen=True, array_like=True):
    """What one answer's text depends on; the same in this process and in a postprocess worker.

    `context_token_ids` are the prompt's last tokens that have text, as many as the
    detokenizer looks at. `first_token_ids` were streamed by another server.
    """

    stop: tuple[str, ...]
    context_token_ids: tuple[int, ...]
    first_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    """For the usage, where the engine cannot tell it any more."""


def text_params(request: ExecutorRequest, tokenizer: Decoder | None) -> TextParams:
    """`tokenizer` None gives no text; stop strings then cannot be served and are refused."""
    stop = request.sampling.stop
    if tokenizer is None and stop:
        raise InvalidRequestError(
            "stop strings need a tokenizer, and this server runs without one",
            field="sampling.stop",
            value=stop,
            limit="none",
        )
    prompt, params = request.prompt_token_ids, request.context_phase_params
    is_generation_only = request.request_type is RequestType.GENERATION_ONLY
    return TextParams(
        stop=stop,
        context_token_ids=() if tokenizer is None else tuple(visible_tail(tokenizer, prompt)),
        first_token_ids=(
            request.output_prefix_token_ids if params is None else params.first_token_ids
        ),
        num_prompt_tokens=0 if is_generation_only else len(prompt),
    )


def stopped_finish(
    finish: EngineFinish | None, *, num_prompt_tokens: int, num_streamed: int
) -> EngineFinish:
    """A STOP with what the engine says was used; completion tokens as streamed."""
    if finish is None:
        usage = Usage(prompt_tokens=num_prompt_tokens)
        finish = EngineFinish(reason=FinishReason.STOP, usage=usage)
    return msgspec.structs.replace(
        finish,
        reason=FinishReason.STOP,
        stop_token_id=None,
        usage=msgspec.structs.replace(finish.usage, completion_tokens=num_streamed),
        context_phase_params=None,
    )


class Postprocessor:
    """`tokenizer` None gives no text."""

    def __init__(self, params: TextParams, tokenizer: Decoder | None) -> None:
        self._params = params
        self._stream = (
            None
            if tokenizer is None
            else TextStream(tokenizer, params.context_token_ids, params.stop)
        )
        if self._stream is not None and params.first_token_ids:
            self._stream.replay(params.first_token_ids)
        self._next_index = len(params.first_token_ids)
        self._num_streamed = 0
        self.is_stopped = False
        """A stop string is complete, and only the engine's last word is awaited."""
        self.stop_string = ""
        self.num_dropped = 0
        self.lease_to_release: ContextPhaseParams | None = None
        """Set where a stop string ended a context phase whose KV nobody will pull."""

    def absorb(self, output: EngineOutput) -> ResultChunk | None:
        """The chunk for the consumer, if any. An output with `error` is for a stopped one only."""
        if self.is_stopped:
            return self._absorb_after_stop(output)
        assert output.error is None
        token_index, token_ids, finish = self._next_index, output.token_ids, output.finish
        if output.token_index != token_index and token_ids:
            if output.finish is None and output.token_index + len(output.token_ids) <= token_index:
                self.num_dropped += len(output.token_ids)
                return None  # a second copy
            raise InternalError(
                f"tokens from {token_index} on are missing: {output.token_index} came next"
            )
        if self._stream is None and finish is None:
            self._next_index = token_index + len(token_ids)
            self._num_streamed += len(token_ids)
            return ResultChunk(token_index=token_index, token_ids=token_ids)
        delta = self._push(output)
        token_ids = token_ids[: delta.num_tokens]
        self._count(token_ids, output)
        if delta.stop_string is not None:
            finish = self._stopped(finish) if finish is not None else None
        elif finish is not None and finish.context_phase_params is not None:
            finish = self._with_text_length(finish, finish.context_phase_params)
        return ResultChunk(
            token_index=token_index,
            token_ids=token_ids,
            text=delta.text,
            text_offset=delta.text_offset,
            finish=finish,
            stop_string=self.stop_string if finish is not None else "",
        )

    def check(self) -> None:
        """Raises AssertionError where the counts do not agree."""
        assert self._next_index == len(self._params.first_token_ids) + self._num_streamed
        if self._stream is not None:
            self._stream.check()

    def _push(self, output: EngineOutput) -> TextDelta:
        """Text held back is flushed at an end, but not where the generation side goes on."""
        if self._stream is None:
            return TextDelta("", 0, None, len(output.token_ids))
        delta = self._stream.push(output.token_ids)
        is_end = output.finish is not None and output.finish.reason is not FinishReason.CONTEXT
        if delta.stop_string is None and is_end:
            tail = self._stream.finish()
            delta = TextDelta(
                delta.text + tail.text, delta.text_offset, tail.stop_string, delta.num_tokens
            )
        if delta.stop_string is not None:
            self.is_stopped = True
            self.stop_string = delta.stop_string
        return delta

    def _count(self, token_ids: tuple[int, ...], output: EngineOutput) -> None:
        num_tokens = len(token_ids)
        self._next_index += num_tokens
        self._num_streamed += num_tokens
        self.num_dropped += len(output.token_ids) - num_tokens

    def _absorb_after_stop(self, output: EngineOutput) -> ResultChunk | None:
        self.num_dropped += len(output.token_ids)
        if output.finish is None and output.error is None:
            return None
        return ResultChunk(
            token_index=self._next_index,
            text_offset=0 if self._stream is None else self._stream.text_length,
            finish=self._stopped(output.finish),
            stop_string=self.stop_string,
        )

    def _stopped(self, finish: EngineFinish | None) -> EngineFinish:
        self.lease_to_release = None if finish is None else finish.context_phase_params
        return stopped_finish(
            finish,
            num_prompt_tokens=self._params.num_prompt_tokens,
            num_streamed=self._num_streamed,
        )

    def _with_text_length(self, finish: EngineFinish, params: ContextPhaseParams) -> EngineFinish:
        length = 0 if self._stream is None else self._stream.text_length
        return msgspec.structs.replace(
            finish,
            context_phase_params=msgspec.structs.replace(params, first_text_length=length),
        )
