"""What a service hands to the executor: a validated, tokenised request."""

from __future__ import annotations

import msgspec

from executor.engine.seam import EngineRequest
from protos.errors import InvalidRequestError
from protos.messages import ContextPhaseParams, DisaggRequestId, RequestType, SamplingParams
from protos.tokens import pack_token_ids

TOKEN_ID_MAX = (1 << 31) - 1


class ExecutorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling.max_tokens` and `sampling.seed` are set."""

    external_id: str
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    disagg_request_id: DisaggRequestId | None = None
    context_phase_params: ContextPhaseParams | None = None


def check_request(request: ExecutorRequest) -> None:
    """What the boundary itself relies on. Raises InvalidRequestError."""
    _require(bool(request.external_id), "external_id", "empty", "at least one character")
    _require(bool(request.prompt_token_ids), "prompt", "0 tokens", "at least one token")
    for name in ("max_tokens", "seed"):
        value = getattr(request.sampling, name)
        _require(value is not None, f"sampling.{name}", "absent", "set by the service")
    _require(request.deadline_s > 0, "deadline_s", request.deadline_s, "over 0")
    low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
    bad = low if low < 0 else high
    _require(0 <= bad <= TOKEN_ID_MAX, "token_ids", bad, f"0 to {TOKEN_ID_MAX}")
    is_generation_only = request.request_type is RequestType.GENERATION_ONLY
    _require(
        (request.context_phase_params is not None) == is_generation_only,
        "context_phase_params",
        "absent" if request.context_phase_params is None else "given",
        "given exactly in a generation_only request",
    )
    if request.request_type is RequestType.CONTEXT_ONLY:
        _require(
            request.disagg_request_id is not None,
            "disagg_request_id",
            "absent",
            "given in a context_only request",
        )


def to_engine_request(request: ExecutorRequest, client_id: int) -> EngineRequest:
    return EngineRequest(
        request_id=client_id,
        request_type=request.request_type,
        prompt_token_ids=pack_token_ids(request.prompt_token_ids),
        sampling=request.sampling,
        deadline_s=request.deadline_s,
        disagg_request_id=request.disagg_request_id,
        context_phase_params=request.context_phase_params,
    )


def _require(holds: bool, field: str, value: object, limit: str) -> None:
    if not holds:
        raise InvalidRequestError(
            f"{field} is {value}; it must be {limit}", field=field, value=value, limit=limit
        )
