"""What an ended request is told: usage, times, and why where it failed."""

from __future__ import annotations

from executor.engine.sequence import Sequence
from protos.errors import DeadlineExceededError, RequestFailedError
from protos.messages import RequestType, StageTimes, Usage


def usage(sequence: Sequence) -> Usage:
    """Each side counts its own work; the prompt belongs to the side that prefilled it."""
    num_produced = sequence.num_completion - sequence.num_streamed_before
    if sequence.request_type is RequestType.GENERATION_ONLY:
        return Usage(completion_tokens=num_produced)
    return Usage(
        prompt_tokens=sequence.num_prompt,
        cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt),
        completion_tokens=num_produced,
    )


def timing(sequence: Sequence, now_s: float) -> StageTimes:
    def since_arrival_ms(name: str) -> float:
        instant = sequence.marks.get(name)
        return 0.0 if instant is None else (instant - sequence.arrived_s) * 1000

    pulled_ms = since_arrival_ms("pulled")
    return StageTimes(
        scheduled_ms=since_arrival_ms("scheduled"),
        first_token_ms=since_arrival_ms("first_token"),
        finished_ms=(now_s - sequence.arrived_s) * 1000,
        transfer_ms=pulled_ms - since_arrival_ms("scheduled") if pulled_ms else 0.0,
    )


def deadline_exceeded(sequence: Sequence) -> DeadlineExceededError:
    allowed_s = sequence.request.deadline_s
    return DeadlineExceededError(
        f"the request did not end within its deadline of {allowed_s:g} s "
        f"(it was {sequence.state.value})",
        field="deadline_ms",
        value=round(allowed_s * 1000),
    )


def not_finite() -> RequestFailedError:
    return RequestFailedError("the logits are not finite for this request")
