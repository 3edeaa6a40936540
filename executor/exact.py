"""Every field of what a caller hands over as exactly its declared type, or a typed refusal.

NumPy's scalars and arrays, lists, and subclasses of Python's own types are taken for what
they hold. What is something else is refused by its field: it must not get as far as a
queue, where it could not be encoded, nor an engine in this process, which trusts its types.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from protos.checks import check_text
from protos.checks import invalid as refusal
from protos.errors import InvalidRequestError, shorten, text_of
from protos.messages import ContextPhaseParams, DisaggRequestId, RequestType, SamplingParams

UINT32_MAX: Final = (1 << 32) - 1
UINT64_MAX: Final = (1 << 64) - 1
INT64_MAX: Final = (1 << 63) - 1
TEXT_LENGTH_MAX = 256
"""Of an id or a method's name."""
_FLOATS = (float, int, np.floating, np.integer)
_ID_BOUNDS = {"router_epoch": UINT64_MAX, "counter": UINT32_MAX, "attempt": UINT32_MAX}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value))
_PARAMS = msgspec.msgpack.Decoder(ContextPhaseParams)
_ARGUMENTS = msgspec.msgpack.Decoder(dict[str, Any])
T = TypeVar("T")


def integer(field: str, value: object, least: int = -INT64_MAX - 1, most: int = UINT64_MAX) -> int:
    exact = _as_int(value)
    if exact is None:
        raise refusal(field, _seen(value), "an integer")
    if not least <= exact <= most:
        raise refusal(field, _seen(exact), f"{least} to {most}")
    return exact


def number(field: str, value: object) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, _FLOATS) or isinstance(value, bool):
        raise refusal(field, _seen(value), "a number")
    try:
        return float.__float__(float(value))
    except Exception:  # too large an integer, or a subclass's own mistake
        raise refusal(field, _seen(value), "a number of 64 bits") from None


def truth(field: str, value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise refusal(field, _seen(value), "true or false")


def text(field: str, value: object, length_max: int | None = None) -> str:
    if not isinstance(value, str):
        raise refusal(field, _seen(value), "text")
    check_text(field, value)
    exact = str.__str__(value)
    if length_max is not None and not 1 <= len(exact) <= length_max:
        raise refusal(field, exact, f"1 to {length_max} characters")
    return exact


def data(field: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(memoryview(value))
    raise refusal(field, _seen(value), "bytes")


def integers(field: str, value: object) -> tuple[int, ...]:
    """Of a prompt's length: one pass at C's speed where all is as it should be."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise refusal(field, _seen(value), "a list of integers")
        return tuple(value.tolist())
    items = _items(field, value, "integers")
    if set(map(type, items)) <= {int}:
        return items
    return tuple(integer(f"{field}[{index}]", item) for index, item in enumerate(items))


def texts(field: str, value: object) -> tuple[str, ...]:
    items = _items(field, value, "strings")
    return tuple(text(f"{field}[{index}]", item) for index, item in enumerate(items))


def request_type(field: str, value: object) -> RequestType:
    try:
        return RequestType(value)  # type: ignore[arg-type]
    except ValueError:
        raise refusal(field, _seen(value), f"one of {', '.join(RequestType)}") from None


def sampling_params(value: object) -> SamplingParams:
    if not isinstance(value, SamplingParams):
        raise refusal("sampling", _seen(value), "SamplingParams")
    max_tokens, seed = value.max_tokens, value.seed
    return SamplingParams(
        max_tokens=None if max_tokens is None else integer(_of("max_tokens"), max_tokens),
        temperature=number(_of("temperature"), value.temperature),
        top_k=integer(_of("top_k"), value.top_k),
        top_p=number(_of("top_p"), value.top_p),
        seed=None if seed is None else integer(_of("seed"), seed, 0),
        stop=texts(_of("stop"), value.stop),
        stop_token_ids=integers(_of("stop_token_ids"), value.stop_token_ids),
        ignore_eos=truth(_of("ignore_eos"), value.ignore_eos),
    )


def disagg_id(value: object) -> DisaggRequestId:
    if not isinstance(value, DisaggRequestId):
        raise refusal("disagg_request_id", _seen(value), "a DisaggRequestId")
    numbers = {
        name: integer(f"disagg_request_id.{name}", getattr(value, name), 0, most)
        for name, most in _ID_BOUNDS.items()
    }
    return DisaggRequestId(**numbers)


def context_params(value: object) -> ContextPhaseParams:
    """What the wire would make of it: its many fields come from another server as a rule."""
    field = "context_phase_params"
    if not isinstance(value, ContextPhaseParams):
        raise refusal(field, _seen(value), "ContextPhaseParams")
    try:
        exact = _PARAMS.decode(_ENCODER.encode(value))
    except Exception as error:
        raise InvalidRequestError(
            f"{field} has a value that is not of its declared type: {text_of(error)}", field=field
        ) from None
    disagg_id(exact.disagg_request_id)
    return exact


def arguments(method: str, value: dict[str, Any]) -> bytes:
    """A control call's, packed: plain data that comes out as it went in."""
    try:
        packed = _ENCODER.encode(value)
        _ARGUMENTS.decode(packed)
    except Exception as error:  # also of an object's own making, or nested too deep
        raise InvalidRequestError(
            f"{shorten(method)}: its arguments are not plain data: {text_of(error)}",
            field="arguments",
            value=type(error).__name__,
            limit="plain data: null, booleans, numbers, text, bytes, lists and dictionaries",
        ) from None
    return packed


def _of(name: str) -> str:
    return f"sampling.{name}"


def _items(field: str, value: object, what: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple | range):
        raise refusal(field, _seen(value), f"a list of {what}")
    return value if type(value) is tuple else tuple(value)


def _as_int(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return int.__index__(operator.index(value))  # type: ignore[arg-type]
    except Exception:  # no integer, or one that cannot be asked
        return None


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _seen(value: object) -> str:
    """What can be said of any object, also of one whose repr fails or is endless."""
    if isinstance(value, str | bytes | int | float | None):
        with contextlib.suppress(Exception):  # too many digits to be told, a subclass's mistake
            return ascii(value) if isinstance(value, str) else repr(value)
    return f"of type {type(value).__name__}"
