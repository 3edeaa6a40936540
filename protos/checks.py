"""What a request must be: ranges that always hold, and what a server can take.

All raise InvalidRequestError (ModelNotFoundError for another model) with field,
value and limit, in the numbers that a user knows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from protos.errors import InvalidRequestError, ModelNotFoundError, shorten
from protos.messages import ModelLimits, SamplingParams

STOP_STRINGS_MAX = 16
STOP_STRING_LENGTH_MAX = 256
STOP_TOKEN_IDS_MAX = 64

_INT32 = (-(1 << 31), (1 << 31) - 1, "an integer of 32 bits")
_UINT64 = (0, (1 << 64) - 1, "an unsigned 64-bit integer")
_INTEGERS = {"max_tokens": _INT32, "top_k": _INT32, "seed": _UINT64}


def check_sendable(params: SamplingParams) -> None:
    """Whether the wire's types hold every value; the ranges are the server's to judge.

    Raises InvalidRequestError.
    """
    for name, (least, most, limit) in _INTEGERS.items():
        value = getattr(params, name)
        if value is not None and not _is_integer(value, least, most):
            raise invalid(f"sampling.{name}", value, limit)
    for name in ("temperature", "top_p"):
        value = getattr(params, name)
        if value is not None and not _is_number(value):
            raise invalid(f"sampling.{name}", value, "a number")
    if not isinstance(params.ignore_eos, bool):
        raise invalid("sampling.ignore_eos", params.ignore_eos, "true or false")
    for index, text in enumerate(_items("stop", params.stop, "strings")):
        check_text(f"sampling.stop[{index}]", text)
    for index, token_id in enumerate(_items("stop_token_ids", params.stop_token_ids, "integers")):
        if not _is_integer(token_id, *_INT32[:2]):
            raise invalid(f"sampling.stop_token_ids[{index}]", token_id, _INT32[2])


def check_text(field: str, text: object) -> None:
    """Whether it is text that UTF-8 can hold. Raises InvalidRequestError.

    Python keeps bytes that were no UTF-8, of a command line or a file, as lone
    surrogates; nothing can send those.
    """
    if not isinstance(text, str):
        raise invalid(field, text, "text")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise invalid(field, ascii(shorten(text)), "text that UTF-8 can hold")


def _items(name: str, value: object, what: str) -> Iterable[object]:
    if not isinstance(value, list | tuple):
        raise invalid(f"sampling.{name}", value, f"a list of {what}")
    return value


def _is_integer(value: object, least: int, most: int) -> bool:
    """NumPy's integers are integers too; 1.0 and "1" are none."""
    try:
        return least <= operator.index(value) <= most  # type: ignore[arg-type]
    except TypeError:
        return False


def _is_number(value: object) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return True


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


def check_limits(
    num_prompt_tokens: int, sampling: SamplingParams, limits: ModelLimits, on: str = "this server"
) -> None:
    """Whether prompt and completion fit. Raises InvalidRequestError.

    The numbers are those a user knows: tokens of the prompt, max_tokens, and
    the limits, which are those of the server that `on` names.
    """
    if num_prompt_tokens < 1:
        raise invalid("prompt", "0 tokens", "at least one token")
    if num_prompt_tokens > limits.max_prompt_tokens:
        raise invalid(
            "prompt",
            f"{num_prompt_tokens} tokens",
            f"at most {limits.max_prompt_tokens} tokens on {on}",
        )
    room = limits.max_total_tokens - num_prompt_tokens
    if room < 1:
        raise invalid(
            "prompt",
            f"{num_prompt_tokens} tokens",
            f"at most {limits.max_total_tokens - 1}, so that one token can follow "
            f"(prompt and completion: {limits.max_total_tokens} on {on})",
        )
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise invalid(
            "sampling.max_tokens",
            sampling.max_tokens,
            f"at most {room} after a prompt of {num_prompt_tokens} tokens "
            f"(prompt and completion: {limits.max_total_tokens} on {on})",
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
