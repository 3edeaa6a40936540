"""What a request must be: ranges that always hold, and what a server can take.

All raise InvalidRequestError (ModelNotFoundError for another model) with field,
value and limit, in the numbers that a user knows.
"""

from __future__ import annotations

import math

from protos.errors import InvalidRequestError, ModelNotFoundError, shorten
from protos.messages import ModelLimits, SamplingParams

STOP_STRINGS_MAX = 16
STOP_STRING_LENGTH_MAX = 256
STOP_TOKEN_IDS_MAX = 64


def check_sampling(params: SamplingParams) -> None:
    """Ranges that hold whatever the model. Raises InvalidRequestError."""
    if params.max_tokens is not None and params.max_tokens < 1:
        raise invalid("sampling.max_tokens", params.max_tokens, "at least 1")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise invalid("sampling.temperature", params.temperature, "a finite number, at least 0")
    if params.top_k < 0:
        raise invalid("sampling.top_k", params.top_k, "at least 0")
    if not 0 < params.top_p <= 1:
        raise invalid("sampling.top_p", params.top_p, "over 0, at most 1")
    if params.seed is not None and not 0 <= params.seed < 1 << 64:
        raise invalid("sampling.seed", params.seed, "an unsigned 64-bit integer")
    if len(params.stop) > STOP_STRINGS_MAX:
        raise invalid("sampling.stop", len(params.stop), f"at most {STOP_STRINGS_MAX} strings")
    for text in params.stop:
        if not 1 <= len(text) <= STOP_STRING_LENGTH_MAX:
            raise invalid("sampling.stop", text, f"1 to {STOP_STRING_LENGTH_MAX} characters")
    if len(params.stop_token_ids) > STOP_TOKEN_IDS_MAX:
        raise invalid(
            "sampling.stop_token_ids", len(params.stop_token_ids), f"at most {STOP_TOKEN_IDS_MAX}"
        )


def check_model(request_model: str, limits: ModelLimits) -> None:
    """Raises ModelNotFoundError where another model is asked for."""
    if request_model and request_model != limits.model:
        raise ModelNotFoundError(
            f"model {shorten(request_model)!r} is not served here; this server has "
            f"{limits.model!r}",
            field="model",
            value=request_model,
            limit=limits.model,
        )


def check_limits(num_prompt_tokens: int, sampling: SamplingParams, limits: ModelLimits) -> None:
    """Whether prompt and completion fit. Raises InvalidRequestError.

    The numbers are those a user knows: tokens of the prompt, max_tokens, and
    the server's limits.
    """
    if num_prompt_tokens < 1:
        raise invalid("prompt", "0 tokens", "at least one token")
    if num_prompt_tokens > limits.max_prompt_tokens:
        raise invalid(
            "prompt",
            f"{num_prompt_tokens} tokens",
            f"at most {limits.max_prompt_tokens} tokens on this server",
        )
    room = limits.max_total_tokens - num_prompt_tokens
    if room < 1:
        raise invalid(
            "prompt",
            f"{num_prompt_tokens} tokens",
            f"at most {limits.max_total_tokens - 1}, so that one token can follow "
            f"(prompt and completion: {limits.max_total_tokens})",
        )
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise invalid(
            "sampling.max_tokens",
            sampling.max_tokens,
            f"at most {room} after a prompt of {num_prompt_tokens} tokens "
            f"(prompt and completion: {limits.max_total_tokens})",
        )


def check_token_ids(token_ids: tuple[int, ...], field: str, limits: ModelLimits) -> None:
    """Whether every id is in the vocabulary. Raises InvalidRequestError."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise invalid(
                f"{field}[{index}]", token_id, f"0 to {limits.vocab_size - 1} (the vocabulary)"
            )


def invalid(field: str, value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {shorten(value) or 'empty'}; it must be {limit}",
        field=field,
        value=value,
        limit=limit,
    )
