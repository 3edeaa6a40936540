"""A request's prompt as token ids, whatever form the client gave it in: the one place.

Sizes are judged before any work is done with what they measure, and all but
short texts are tokenised in a thread: nobody's stream waits for another's prompt.
"""

from __future__ import annotations

import asyncio

from common.text.tokenizer import Tokenizer
from protos.checks import check_limits, check_token_ids
from protos.errors import InvalidRequestError
from protos.messages import GenerateRequest, ModelLimits

INLINE_CHARACTERS_MAX = 4096
"""A longer text is tokenised in a thread."""
CHARACTERS_PER_TOKEN_MAX = 256
"""No tokenizer's tokens are longer on average, so a text beyond this is sure not to fit."""
TEMPLATE_CHARACTERS_PER_MESSAGE = 64
"""What a chat template adds around each message, roughly."""


async def prompt_token_ids(
    request: GenerateRequest,
    tokenizer: Tokenizer | None,
    limits: ModelLimits,
    where: str,
    limited_by: str = "this server",
) -> tuple[int, ...]:
    """The prompt, checked against the limits.

    `where` says whose tokenizer it would be, `limited_by` whose limits they are.

    Raises InvalidRequestError, naming field, value and limit.
    """
    sampling = request.sampling
    check_token_ids(sampling.stop_token_ids, "sampling.stop_token_ids", limits)
    if tokenizer is None and sampling.stop:
        raise _no_text("sampling.stop", f"{len(sampling.stop)} strings", where)
    token_ids = request.token_ids
    if token_ids is None:
        token_ids = await _tokenised(request, tokenizer, limits, where)
    check_limits(len(token_ids), sampling, limits, limited_by)
    check_token_ids(token_ids, "token_ids", limits)
    return token_ids


async def _tokenised(
    request: GenerateRequest, tokenizer: Tokenizer | None, limits: ModelLimits, where: str
) -> tuple[int, ...]:
    field, num_characters = _size(request)
    if tokenizer is None:
        raise _no_text(field, f"{num_characters} characters", where)
    characters_max = limits.max_prompt_tokens * CHARACTERS_PER_TOKEN_MAX
    if num_characters > characters_max:
        raise InvalidRequestError(
            f"{field} is {num_characters} characters; it must be at most "
            f"{limits.max_prompt_tokens} tokens, which {characters_max} characters are sure "
            "to exceed",
            field=field,
            value=f"{num_characters} characters",
            limit=f"{limits.max_prompt_tokens} tokens",
        )
    if num_characters <= INLINE_CHARACTERS_MAX:
        return _encode(request, tokenizer)
    return await asyncio.to_thread(_encode, request, tokenizer)


def _size(request: GenerateRequest) -> tuple[str, int]:
    """The prompt's field and how many characters will be tokenised, roughly."""
    if request.chat is None:
        return "text", len(request.text or "")
    return "chat", sum(
        len(message.role) + len(message.content) + TEMPLATE_CHARACTERS_PER_MESSAGE
        for message in request.chat
    )


def _encode(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    if request.chat is not None:
        return tokenizer.encode_chat(request.chat)
    return tokenizer.encode(request.text or "")


def _no_text(field: str, value: str, where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value}; it must be absent: {where} has no tokenizer, so send token_ids",
        field=field,
        value=value,
        limit=f"absent, since {where} has no tokenizer",
    )
