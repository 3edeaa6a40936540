"""A request's prompt as token ids, whatever form the client gave it in."""

from __future__ import annotations

import asyncio

from common.text.tokenizer import Tokenizer
from protos.checks import check_token_ids
from protos.errors import InvalidRequestError
from protos.messages import GenerateRequest, ModelLimits

INLINE_LENGTH_MAX = 16_384
"""Characters that are tokenised on the event loop; longer prompts go to a thread."""
CHARACTERS_PER_TOKEN_MAX = 256


async def prompt_token_ids(
    request: GenerateRequest, tokenizer: Tokenizer | None, limits: ModelLimits
) -> tuple[int, ...]:
    """Raises InvalidRequestError, naming field, value and limit."""
    check_token_ids(request.sampling.stop_token_ids, "sampling.stop_token_ids", limits)
    if tokenizer is None and request.sampling.stop:
        raise _no_text("sampling.stop", f"{len(request.sampling.stop)} strings")
    if request.token_ids is not None:
        check_token_ids(request.token_ids, "token_ids", limits)
        return request.token_ids
    field = "text" if request.text is not None else "chat"
    length = _length(request)
    if tokenizer is None:
        raise _no_text(field, f"{length} characters")
    length_max = limits.max_prompt_tokens * CHARACTERS_PER_TOKEN_MAX
    if length > length_max:
        raise InvalidRequestError(
            f"{field} is {length} characters; it must be at most {limits.max_prompt_tokens} "
            f"tokens on this server, and so far fewer than {length_max} characters",
            field=field,
            value=f"{length} characters",
            limit=f"{limits.max_prompt_tokens} tokens",
        )
    if length > INLINE_LENGTH_MAX:
        return await asyncio.to_thread(_encode, request, tokenizer)
    return _encode(request, tokenizer)


def _encode(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    if request.text is not None:
        return tokenizer.encode(request.text)
    return tokenizer.encode_chat(request.chat or ())


def _length(request: GenerateRequest) -> int:
    if request.text is not None:
        return len(request.text)
    return sum(len(message.content) for message in request.chat or ())


def _no_text(field: str, value: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value}; it must be absent: this server has no tokenizer, send token_ids",
        field=field,
        value=value,
        limit="absent on a server without a tokenizer",
    )
