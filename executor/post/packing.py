"""A postprocess worker's answers as the bytes that will cross, none over a frame's bound.

One that is too large is told in parts, in order; the last part ends its work. A single chunk
that is too large, or cannot be encoded, is the failure of its request and of nothing else.
"""

from __future__ import annotations

import msgspec

from executor.packing import encoded
from executor.post.messages import Answer, lease_of
from protos.errors import RequestFailedError


def packed_answers(answer: Answer, bytes_max: int) -> list[msgspec.Raw]:
    """In order. Never raises on account of what a tokenizer has said."""
    body, problem = encoded(answer, bytes_max)
    if not problem:
        return [msgspec.Raw(body)]
    parts = _parts(answer, f"the text cannot be sent: {problem}", bytes_max)
    return [raw for part in parts for raw in packed_answers(part, bytes_max)]


def _parts(answer: Answer, problem: str, bytes_max: int) -> list[Answer]:
    """Smaller ones. Leases and orphans stay together: what names one is smaller than the output
    that brought it, and all of those came in one message."""
    chunks, failed, replace = answer.chunks, answer.failed, msgspec.structs.replace
    if len(chunks) > 1:
        half = len(chunks) // 2
        return [_news(answer, chunks=chunks[:half]), replace(answer, chunks=chunks[half:])]
    if chunks:
        error = RequestFailedError(problem, field="text", limit=f"{bytes_max} bytes").to_data()
        finish = chunks[0].finish
        params = None if finish is None else finish.context_phase_params
        leases = () if params is None else (lease_of(params),)
        return [
            replace(
                answer,
                chunks=(),
                failed=((chunks[0].client_id, error), *failed),
                leases=(*leases, *answer.leases),
            )
        ]
    assert len(failed) > 1, "what one work asks for fits into one answer"
    half = len(failed) // 2
    return [_news(answer, failed=failed[:half]), replace(answer, failed=failed[half:])]


def _news(answer: Answer, **told: tuple[object, ...]) -> Answer:
    """A part before the last one."""
    empty = msgspec.structs.replace(
        answer, chunks=(), failed=(), leases=(), orphans=(), num_dropped_tokens=0, is_part=True
    )
    return msgspec.structs.replace(empty, **told)
