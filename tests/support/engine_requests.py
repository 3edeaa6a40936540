"""Requests and context_phase_params for the doubles of engine_doubles.py."""

from __future__ import annotations

from collections.abc import Sequence

from common.hashing import prompt_digest
from executor.engine.seam import EngineRequest
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    RequestType,
    SamplingParams,
    Usage,
)
from protos.tokens import pack_token_ids
from tests.support.engine_doubles import LAYOUT, completion


def params_for(
    prompt: Sequence[int], disagg_id: DisaggRequestId, num_first: int = 1
) -> ContextPhaseParams:
    """As a context server with another incarnation would have made them."""
    return ContextPhaseParams(
        first_token_ids=tuple(completion(prompt, num_first)),
        disagg_request_id=disagg_id,
        server_name="other",
        incarnation=2,
        rank_addresses=(b"other",),
        transport="hand",
        layout=LAYOUT,
        num_prompt_tokens=len(prompt),
        prompt_digest=prompt_digest(pack_token_ids(prompt)),
        block_hashes=(),
        lease_ms=1000,
        pull_token=b"t" * 16,
        usage=Usage(),
        model="double",
        seed=0,
    )


def request_for(
    request_id: int,
    prompt: Sequence[int],
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION,
    *,
    max_tokens: int = 4,
    deadline_s: float = 100.0,
    num_first: int = 1,
    num_existing: int = 0,
) -> EngineRequest:
    """Its hand-off is named by its request id; `num_existing` tokens are its output prefix."""
    disagg_id = DisaggRequestId(1, request_id, 0)
    is_plain = request_type is RequestType.CONTEXT_AND_GENERATION
    takes_over = request_type is RequestType.GENERATION_ONLY
    return EngineRequest(
        request_id=request_id,
        request_type=request_type,
        prompt_token_ids=pack_token_ids(prompt),
        sampling=SamplingParams(
            max_tokens=1 if request_type is RequestType.CONTEXT_ONLY else max_tokens, seed=0
        ),
        deadline_s=deadline_s,
        disagg_request_id=None if is_plain else disagg_id,
        context_phase_params=params_for(prompt, disagg_id, num_first) if takes_over else None,
        output_prefix_token_ids=pack_token_ids(completion(prompt, num_existing)),
    )
