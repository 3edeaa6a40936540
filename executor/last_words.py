"""What a child process of ours says of its own end, as plain data, and how it ends."""

from __future__ import annotations

import os
import sys

import msgspec

from protos.errors import BatonError, ErrorData, InternalError, Severity, describe


def last_words(error: BaseException) -> ErrorData:
    """Whatever its kind, an error that left the loop or the load is no single request's."""
    if not isinstance(error, BatonError):
        error = InternalError(describe(error))
    return msgspec.structs.replace(error.to_data(), severity=Severity.ENGINE)


def end(status: int) -> None:
    """No thread may keep a finished process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
