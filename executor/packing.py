"""Messages to and from the worker as the bytes that will cross, made when they are offered.

Whatever cannot be encoded, or is too large for a frame, shows here, while whose it is is
known: a request's is its caller's InvalidRequestError by field; an answer's becomes the
error of the call or request that it answers, and a step's outputs are told in parts. So no
queue ever holds what it cannot send, and no connection is cut by a frame over its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from executor.engine.seam import EngineOutput
from executor.ipc import FRAME_ROOM_BYTES
from executor.messages import (
    AuditReply,
    CallReply,
    KvSnapshotReply,
    LoadReply,
    Observed,
    Outputs,
    Reply,
    ToProxy,
    ToWorker,
)
from protos.errors import InvalidRequestError, RequestFailedError, describe, text_of

_ENCODER: Final = msgspec.msgpack.Encoder()
_MIB: Final = 1 << 20
T = TypeVar("T")


def body_bytes_max(message_bytes_max: int) -> int:
    """What one frame's messages may have together."""
    return max(message_bytes_max - FRAME_ROOM_BYTES, message_bytes_max // 2)


class Packer:
    """Of one way to the worker."""

    def __init__(self, message_bytes_max: int) -> None:
        self.bytes_max = body_bytes_max(message_bytes_max)

    def __call__(self, message: ToWorker) -> msgspec.Raw:
        """Raises InvalidRequestError that names the field."""
        try:
            body = _ENCODER.encode(message)
        except Exception as error:  # msgspec's own kinds, and whatever a strange object raises
            field = _first(message, _cannot_be_encoded)
            raise InvalidRequestError(
                f"{field} cannot be sent to the engine: {text_of(error)}",
                field=field,
                value=type(error).__name__,
                limit="plain data of the declared type",
            ) from None
        if len(body) > self.bytes_max:
            field = _first(message, lambda value: len(_ENCODER.encode(value)) > len(body) // 2)
            raise InvalidRequestError(
                f"{field} makes a message of {len(body)} bytes to the engine "
                f"({len(body) / _MIB:.1f} MiB); it must be at most {self.bytes_max}",
                field=field,
                value=f"{len(body)} bytes",
                limit=f"{self.bytes_max} bytes",
            )
        return msgspec.Raw(body)


def encoded(message: object, bytes_max: int) -> tuple[bytes, str]:
    """The bytes that will cross, and why they cannot; empty where they can. Never raises."""
    try:
        body = _ENCODER.encode(message)
    except Exception as error:  # msgspec's own kinds, and whatever a strange object raises
        return b"", f"it cannot be encoded: {describe(error)}"
    if len(body) > bytes_max:
        return body, f"it has {len(body)} bytes, and a message may have {bytes_max}"
    return body, ""


def packed_answers(message: ToProxy, bytes_max: int) -> list[msgspec.Raw]:
    """In order; more than one where the message has to be told in parts, none where nothing of
    it can be told. Never raises on account of the message."""
    body, problem = encoded(message, bytes_max)
    if not problem:
        return [msgspec.Raw(body)]
    match message:
        case Reply() | LoadReply() | AuditReply() | CallReply() | KvSnapshotReply():
            failure = RequestFailedError(
                f"the engine's answer cannot be sent: {problem}",
                field="answer",
                value=f"{len(body)} bytes",
                limit=f"{bytes_max} bytes",
            )
            return packed_answers(CallReply(message.call_id, (), failure.to_data()), bytes_max)
        case Outputs():
            return _in_parts(_parts_of_outputs(message, problem), bytes_max)
        case Observed():
            return _in_parts(_parts_of_observed(message), bytes_max)
        case _:
            return []


def _in_parts(parts: list[ToProxy], bytes_max: int) -> list[msgspec.Raw]:
    return [body for part in parts for body in packed_answers(part, bytes_max)]


def _parts_of_outputs(message: Outputs, problem: str) -> list[ToProxy]:
    """Smaller ones, in order. Acceptances come first, as they do in one message."""
    outputs, buckets = message.outputs, message.buckets
    if message.accepted and (outputs or buckets):
        return [Outputs(message.accepted, ()), Outputs((), outputs, buckets)]
    if outputs and buckets:
        return [Outputs((), outputs), Outputs((), (), buckets)]
    if len(buckets) > 1:
        return [Outputs((), (), (bucket,)) for bucket in buckets]
    if len(outputs) > 1:
        half = len(outputs) // 2
        return [Outputs((), outputs[:half]), Outputs((), outputs[half:])]
    if outputs and outputs[0].error is None:
        error = RequestFailedError(f"what the engine said cannot be sent: {problem}")
        failed = EngineOutput(request_id=outputs[0].request_id, error=error.to_data())
        return [Outputs((), (failed,))]
    return []


def _parts_of_observed(message: Observed) -> list[ToProxy]:
    events = message.kv_events
    if message.stats is not None and events:
        return [Observed(message.stats, ()), Observed(None, events)]
    half = len(events) // 2
    return [Observed(None, events[:half]), Observed(None, events[half:])] if half else []


def _first(message: msgspec.Struct, is_it: Callable[[object], bool]) -> str:
    """The name of the innermost field that `is_it`, or of the whole message."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if is_it(value):
            inner = _first(value, is_it) if isinstance(value, msgspec.Struct) else ""
            name = "prompt" if name == "prompt_token_ids" else name
            return _joined(name, inner)
    return "" if not message.__struct_fields__ else _WHOLE


_WHOLE: Final = "message"


def _joined(name: str, inner: str) -> str:
    if name == "request" and inner:  # of Submit: not the caller's word
        return "request" if inner == _WHOLE else inner
    return name if inner in ("", _WHOLE) else f"{name}.{inner}"


def _cannot_be_encoded(value: object) -> bool:
    try:
        _ENCODER.encode(value)
    except Exception:
        return True
    return False
