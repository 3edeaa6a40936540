"""Two legs' answers as one: continuity is checked, usage is summed, times are kept apart.

Pure. The servers number tokens and text by their place in the whole completion;
`Continuity` makes sure that what is forwarded has no gap and no repeat.
"""

from __future__ import annotations

from protos.errors import InternalError
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    Finish,
    FinishReason,
    GenerateChunk,
    StageTimes,
    Usage,
)


class Continuity:
    """Where the next token and the next character must start."""

    def __init__(self) -> None:
        self.next_token_index = 0
        self.next_text_offset = 0

    def fault_in(self, chunk: GenerateChunk) -> InternalError | None:
        """Take the chunk in, or say why it must not be forwarded."""
        if chunk.token_ids and chunk.token_index != self.next_token_index:
            return InternalError(
                f"a server sent token {chunk.token_index} where {self.next_token_index} was due",
                field="token_index",
                value=chunk.token_index,
                limit=self.next_token_index,
            )
        if chunk.text and chunk.text_offset != self.next_text_offset:
            return InternalError(
                f"a server sent text from {chunk.text_offset} on where {self.next_text_offset} "
                "was due",
                field="text_offset",
                value=chunk.text_offset,
                limit=self.next_text_offset,
            )
        self.next_token_index += len(chunk.token_ids)
        self.next_text_offset += len(chunk.text)
        return None


def merge_finishes(context: Finish, context_times: StageTimes, generation: Finish) -> Finish:
    """The finish of a handed-over request: each side counted its own work once."""
    usage = Usage(
        prompt_tokens=context.usage.prompt_tokens,
        cached_tokens=context.usage.cached_tokens,
        completion_tokens=context.usage.completion_tokens + generation.usage.completion_tokens,
    )
    return Finish(
        reason=generation.reason,
        stop_string=generation.stop_string,
        stop_token_id=generation.stop_token_id,
        usage=usage,
        kv=generation.kv,
        context_timing=context.context_timing or context_times,
        generation_timing=generation.generation_timing,
    )


def finish_of(chunk: GenerateChunk) -> Finish:
    assert chunk.finish is not None, "a finished event without a finish"
    return chunk.finish


def whole_fault(chunk: GenerateChunk) -> InternalError | None:
    """What is wrong with the end of a leg that must bring the answer."""
    if finish_of(chunk).reason is FinishReason.CONTEXT:
        return InternalError("a server ended with a hand-off where an answer was due")
    return None


def handoff_fault(
    finish: Finish, params: ContextPhaseParams | None, expected: DisaggRequestId | None
) -> InternalError | None:
    """What is wrong with the end of a context leg that says that it hands over."""
    if finish.reason is not FinishReason.CONTEXT:
        return None
    if params is None:
        return InternalError("a context server finished without context_phase_params")
    if params.disagg_request_id != expected:
        return InternalError(
            "a context server answered another hand-off",
            field="disagg_request_id",
            value=str(params.disagg_request_id),
            limit=str(expected),
        )
    return None
