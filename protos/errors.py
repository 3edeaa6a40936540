"""Every error that Baton raises on purpose, split by whose fault it is.

    BatonError
    ├── ConfigError              a file, flag or environment that cannot work (start-up)
    ├── RequestError             ends one request, nobody else's
    │   ├── InvalidRequestError      caller   INVALID_ARGUMENT     names field, value, limit
    │   ├── ModelNotFoundError       caller   NOT_FOUND
    │   ├── DuplicateRequestError    caller   ALREADY_EXISTS
    │   ├── AccessDeniedError        caller   PERMISSION_DENIED    a missing or wrong control key
    │   ├── UnsupportedError         caller   UNIMPLEMENTED        this engine or form never does it
    │   ├── NotNowError              caller   FAILED_PRECONDITION  the server's state forbids it
    │   ├── WrongThreadError         caller   FAILED_PRECONDITION  it would wait for itself
    │   ├── SlowConsumerError        caller   RESOURCE_EXHAUSTED   left too much unread
    │   ├── RequestCancelledError    caller   CANCELLED
    │   ├── DeadlineExceededError    us       DEADLINE_EXCEEDED
    │   ├── OverloadedError          us       RESOURCE_EXHAUSTED   safe to retry
    │   ├── KvTransferError          peer     UNAVAILABLE          safe to retry
    │   ├── PostprocessError         us       UNAVAILABLE          safe to retry
    │   └── RequestFailedError       us       INTERNAL
    ├── ServerUnavailableError   peer     UNAVAILABLE          safe to retry
    │   └── EngineDeadError          us       UNAVAILABLE          sticky: the engine is gone
    └── InternalError            us       INTERNAL

A foreign exception is translated once, at the seam where it is caught. Errors
cross processes as plain data (`to_data`, `from_data`), never pickled.

How much an error ends is its `severity`: a field of every error and of its data,
never concluded from the Python type. Each kind has a usual one (REQUEST below
RequestError and for a server that was not there, ENGINE elsewhere); who raises an
error may say otherwise.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

TEXT_LENGTH_MAX = 4000
"""Of a foreign exception's text in a message of ours."""


class Fault(enum.StrEnum):
    """Who has to change something for the next try to succeed."""

    CALLER = "caller"
    PEER = "peer"
    US = "us"


class Severity(enum.StrEnum):
    """What an error ends."""

    REQUEST = "request"
    """One request or call; every other one goes on."""
    ENGINE = "engine"
    """The engine, and so everything that is pending on it."""


class ErrorData(msgspec.Struct, frozen=True, kw_only=True):
    """A BatonError as it crosses a queue or a wire."""

    kind: str
    severity: Severity
    message: str
    field: str = ""
    value: str = ""
    limit: str = ""


class BatonError(Exception):
    """Base of the tree. `status` is the gRPC status code's name.

    `field`, `value` and `limit` name what was wrong, where that can be said;
    they travel in the error details.
    """

    status: ClassVar[str] = "INTERNAL"
    fault: ClassVar[Fault] = Fault.US
    is_retryable: ClassVar[bool] = False
    severity: Severity = Severity.ENGINE
    """A kind's usual one, where the constructor is given none."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = "",
        limit: object = "",
        severity: Severity | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if severity is not None:
            self.severity = severity
        self.field = field
        self.value = shorten(value)
        self.limit = str(limit)

    def to_data(self) -> ErrorData:
        return ErrorData(
            kind=type(self).__name__,
            severity=self.severity,
            message=_sendable(self.message),
            field=_sendable(self.field),
            value=_sendable(self.value),
            limit=_sendable(self.limit),
        )


class ConfigError(BatonError):
    """A configuration that cannot work; the message says what to change."""

    status = "FAILED_PRECONDITION"
    fault = Fault.CALLER


class RequestError(BatonError):
    """Ends one request and leaves every other one alone."""

    severity = Severity.REQUEST


class InvalidRequestError(RequestError):
    status = "INVALID_ARGUMENT"
    fault = Fault.CALLER


class ModelNotFoundError(RequestError):
    status = "NOT_FOUND"
    fault = Fault.CALLER


class DuplicateRequestError(RequestError):
    status = "ALREADY_EXISTS"
    fault = Fault.CALLER


class AccessDeniedError(RequestError):
    status = "PERMISSION_DENIED"
    fault = Fault.CALLER


class UnsupportedError(RequestError):
    """Asked of an engine or a form that never does it; the message says which one would."""

    status = "UNIMPLEMENTED"
    fault = Fault.CALLER


class NotNowError(RequestError):
    """The state forbids it, as a sleeping engine does; the message names what has to change."""

    status = "FAILED_PRECONDITION"
    fault = Fault.CALLER


class WrongThreadError(RequestError):
    """A blocking call on the very thread that would have to end it; nothing has happened."""

    status = "FAILED_PRECONDITION"
    fault = Fault.CALLER


class SlowConsumerError(RequestError):
    """The consumer left more of its answer unread than it had said it would."""

    status = "RESOURCE_EXHAUSTED"
    fault = Fault.CALLER


class RequestCancelledError(RequestError):
    status = "CANCELLED"
    fault = Fault.CALLER


class DeadlineExceededError(RequestError):
    status = "DEADLINE_EXCEEDED"


class OverloadedError(RequestError):
    status = "RESOURCE_EXHAUSTED"
    is_retryable = True


class KvTransferError(RequestError):
    """The KV cache could not be brought over; the prompt may be tried again."""

    status = "UNAVAILABLE"
    fault = Fault.PEER
    is_retryable = True


class PostprocessError(RequestError):
    """The process that made this request's text is gone; the engine is well."""

    status = "UNAVAILABLE"
    is_retryable = True


class RequestFailedError(RequestError):
    """This request made the engine fail, and only this one."""


class ServerUnavailableError(BatonError):
    """This call found nobody; the next one may."""

    severity = Severity.REQUEST
    status = "UNAVAILABLE"
    fault = Fault.PEER
    is_retryable = True


class EngineDeadError(ServerUnavailableError):
    """The engine is gone. The message tells the first cause; it stays so for ever."""

    severity = Severity.ENGINE
    fault = Fault.US


class InternalError(BatonError):
    """A defect of ours, told in full in the log and in short to the caller."""


def _tree(root: type[BatonError]) -> dict[str, type[BatonError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds |= _tree(child)
    return kinds


KINDS = _tree(BatonError)


def from_data(data: ErrorData) -> BatonError:
    """The error again, as severe as it was told.

    A kind that this version does not know becomes InternalError.
    """
    kind = KINDS.get(data.kind, InternalError)
    return kind(
        data.message,
        field=data.field,
        value=data.value,
        limit=data.limit,
        severity=data.severity,
    )


def _sendable(text: str) -> str:
    """Lone surrogates, as in a path that is no UTF-8, cannot be encoded: told by their numbers."""
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """A foreign exception as a message of ours may tell it: its type and its text."""
    text, kind = text_of(error), type(error).__name__
    return f"{kind}: {text}" if text else kind


def text_of(error: BaseException) -> str:
    """Its own text, bounded; empty where it has none, or asking for it raises, since that is
    a stranger's code too: the fault that is being told must not become a second one."""
    try:
        return shorten(str(error), TEXT_LENGTH_MAX)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""


def shorten(value: object, length_max: int = 80) -> str:
    """A value as an error message may show it."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length_max else text[: length_max - 1] + "…"
