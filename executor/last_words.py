"""What a worker says of its own end, as plain data."""

from __future__ import annotations

import msgspec

from protos.errors import BatonError, ErrorData, InternalError, Severity


def last_words(error: BaseException) -> ErrorData:
    """Whatever its kind, an error that left the loop or the load has ended the engine."""
    if not isinstance(error, BatonError):
        error = InternalError(f"{type(error).__name__}: {error}")
    return msgspec.structs.replace(error.to_data(), severity=Severity.ENGINE)
