"""The one table between our errors and gRPC statuses.

A status carries google.rpc.ErrorInfo (the error's kind, its severity, whose fault
it is, whether a retry is safe) and, for what the caller gave, google.rpc.BadRequest.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from protos.errors import (
    KINDS,
    AccessDeniedError,
    BatonError,
    DeadlineExceededError,
    DuplicateRequestError,
    ErrorData,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NotNowError,
    OverloadedError,
    RequestCancelledError,
    ServerUnavailableError,
    Severity,
    UnsupportedError,
    from_data,
)

ERROR_DOMAIN = "baton"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

_PLAIN_CODES: dict[str, type[BatonError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": ModelNotFoundError,
    "ALREADY_EXISTS": DuplicateRequestError,
    "PERMISSION_DENIED": AccessDeniedError,
    "UNAUTHENTICATED": AccessDeniedError,
    "UNIMPLEMENTED": UnsupportedError,
    "FAILED_PRECONDITION": NotNowError,
    "CANCELLED": RequestCancelledError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": ServerUnavailableError,
}

_SEVERITIES = {severity.value: severity for severity in Severity}


def grpc_code(error: BatonError) -> grpc.StatusCode:
    return getattr(grpc.StatusCode, error.status)  # type: ignore[no-any-return]


def status_details(error: BatonError) -> bytes:
    """A serialised google.rpc.Status, for the trailer `grpc-status-details-bin`."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=error.message)
    info = error_details_pb2.ErrorInfo(
        reason=type(error).__name__,
        domain=ERROR_DOMAIN,
        metadata={
            "severity": error.severity.value,
            "fault": error.fault.value,
            "retryable": str(error.is_retryable).lower(),
            "field": error.field,
            "value": error.value,
            "limit": error.limit,
        },
    )
    _pack(status, info)
    if error.field and error.status == "INVALID_ARGUMENT":
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    encoded: bytes = status.SerializeToString()
    return encoded


def _pack(status: Any, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def error_from_rpc(rpc_error: Any, peer: str = "") -> BatonError:
    """Our error again from a failed call (sync or aio).

    A call that failed without our details, such as a refused connection, becomes
    the error of its status code; `peer` then names who was called.
    """
    for key, value in rpc_error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            error = _error_from_details(value)
            if error is not None:
                return error
    kind = _PLAIN_CODES.get(rpc_error.code().name, InternalError)
    at = f" ({peer})" if peer else ""
    return kind(f"{rpc_error.details() or rpc_error.code().name}{at}")


def _severity(info: Any) -> Severity:
    """As told; its kind's usual one where a peer of another version tells none or a new one."""
    return _SEVERITIES.get(info.metadata.get("severity", ""), KINDS[info.reason].severity)


def _error_from_details(value: bytes) -> BatonError | None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(value)
    except DecodeError:
        return None
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN and info.reason in KINDS:
            return from_data(
                ErrorData(
                    kind=info.reason,
                    severity=_severity(info),
                    message=status.message,
                    field=info.metadata.get("field", ""),
                    value=info.metadata.get("value", ""),
                    limit=info.metadata.get("limit", ""),
                )
            )
    return None
