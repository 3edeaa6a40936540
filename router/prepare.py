"""A client's request becomes one that every server will take, or is refused.

All validation happens here, once: the prompt is tokenised once, limits are those
of both roles, and what the client left open (seed, max_tokens) is decided, so
that both legs see the same.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from common.text.prompt import prompt_token_ids
from common.text.tokenizer import Tokenizer
from protos.checks import check_model
from protos.errors import InvalidRequestError
from protos.messages import GenerateRequest, RequestType, SamplingParams
from router.fleet import Fleet


@dataclass(frozen=True)
class Prepared:
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """With seed and max_tokens decided."""
    max_tokens: int
    seed: int


def refuse_internal_fields(request: GenerateRequest) -> None:
    """The router alone decides on legs. Raises InvalidRequestError."""
    if request.request_type is not RequestType.CONTEXT_AND_GENERATION:
        raise InvalidRequestError(
            f"request_type is {request.request_type}; a client of the router may only ask for "
            f"{RequestType.CONTEXT_AND_GENERATION}, since the router decides on the phases",
            field="request_type",
            value=request.request_type.value,
            limit=RequestType.CONTEXT_AND_GENERATION.value,
        )
    if request.disagg_request_id is not None:
        raise InvalidRequestError(
            "disagg_request_id is given; it must be absent, since the router mints it",
            field="disagg_request_id",
            value=str(request.disagg_request_id),
            limit="absent",
        )


async def prepare(request: GenerateRequest, fleet: Fleet, tokenizer: Tokenizer | None) -> Prepared:
    """Raises InvalidRequestError, ModelNotFoundError or ServerUnavailableError."""
    limits = fleet.limits()
    check_model(request.model, limits)
    token_ids = await prompt_token_ids(
        request, tokenizer, limits, "this router", fleet.limited_by()
    )
    sampling = request.sampling
    max_tokens = sampling.max_tokens or limits.max_total_tokens - len(token_ids)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return Prepared(
        prompt_token_ids=token_ids,
        sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed),
        max_tokens=max_tokens,
        seed=seed,
    )
