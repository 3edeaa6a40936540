"""A client's request becomes one that every server will take, or is refused.

All validation happens here, once: the prompt is tokenised once, limits are those
of both roles, and what the client left open (seed, max_tokens) is decided, so
that both legs see the same.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import msgspec

from common.text.tokenizer import Tokenizer
from protos.checks import check_limits, check_model, check_token_ids
from protos.errors import InvalidRequestError
from protos.messages import GenerateRequest, ModelLimits, RequestType, SamplingParams
from router.fleet import Fleet

INLINE_CHARACTERS_MAX = 4096
"""A longer text is tokenised in a thread, so that other streams do not wait for it."""
CHARACTERS_PER_TOKEN_MAX = 256


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
    sampling = request.sampling
    check_token_ids(sampling.stop_token_ids, "sampling.stop_token_ids", limits)
    if tokenizer is None and sampling.stop:
        raise _no_text("sampling.stop", f"{len(sampling.stop)} strings")
    token_ids = await _token_ids(request, tokenizer, limits)
    check_token_ids(token_ids, "token_ids", limits)
    check_limits(len(token_ids), sampling, limits)
    max_tokens = sampling.max_tokens or limits.max_total_tokens - len(token_ids)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return Prepared(
        prompt_token_ids=token_ids,
        sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed),
        max_tokens=max_tokens,
        seed=seed,
    )


async def _token_ids(
    request: GenerateRequest, tokenizer: Tokenizer | None, limits: ModelLimits
) -> tuple[int, ...]:
    if request.token_ids is not None:
        return request.token_ids
    field, length = _length(request)
    if tokenizer is None:
        raise _no_text(field, f"{length} characters")
    length_max = limits.max_prompt_tokens * CHARACTERS_PER_TOKEN_MAX
    if length > length_max:
        raise InvalidRequestError(
            f"{field} is {length} characters; at most {limits.max_prompt_tokens} tokens fit, "
            f"which {length_max} characters are sure to exceed",
            field=field,
            value=f"{length} characters",
            limit=f"{limits.max_prompt_tokens} tokens",
        )
    if length <= INLINE_CHARACTERS_MAX:
        return _encode(request, tokenizer)
    return await asyncio.to_thread(_encode, request, tokenizer)


def _length(request: GenerateRequest) -> tuple[str, int]:
    """The prompt's field and how many characters it holds."""
    if request.chat is not None:
        return "chat", sum(len(message.content) for message in request.chat)
    assert request.text is not None, "the codec lets exactly one kind of prompt through"
    return "text", len(request.text)


def _encode(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    if request.chat is not None:
        return tokenizer.encode_chat(request.chat)
    return tokenizer.encode(request.text or "")


def _no_text(field: str, value: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value}; it must be absent: this router has no tokenizer (its key model is "
        "empty), so send token_ids",
        field=field,
        value=value,
        limit="absent on a router without a tokenizer",
    )
