"""The error tree crosses queues and gRPC without losing its kind, its fault or its numbers."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from protos import errors
from protos.status import (
    ERROR_DOMAIN,
    STATUS_DETAILS_KEY,
    error_from_rpc,
    grpc_code,
    status_details,
)


class FailedCall:
    """What a failed gRPC call shows: a code, a text, trailers."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: object) -> None:
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> object:
        return self._trailers


@pytest.mark.parametrize("kind", list(errors.KINDS.values()))
def test_every_kind_survives_queue_and_wire(kind: type[errors.BatonError]) -> None:
    error = kind("what happened", field="f", value=3, limit=2)
    again = errors.from_data(error.to_data())
    call = FailedCall(
        grpc_code(error), error.message, ((STATUS_DETAILS_KEY, status_details(error)),)
    )
    for copy in (again, error_from_rpc(call)):
        assert type(copy) is kind
        assert copy.to_data() == error.to_data()


@pytest.mark.parametrize("severity", list(errors.Severity))
def test_a_kind_from_a_newer_peer_becomes_internal_and_stays_as_severe(
    severity: errors.Severity,
) -> None:
    """Guards against taking every unknown error for the engine's death."""
    data = errors.ErrorData(kind="FromTheFutureError", severity=severity, message="m")
    error = errors.from_data(data)
    assert type(error) is errors.InternalError
    assert error.severity is severity


@pytest.mark.parametrize("severity", list(errors.Severity))
@pytest.mark.parametrize("kind", list(errors.KINDS.values()))
def test_who_raises_an_error_says_how_severe_it_is(
    kind: type[errors.BatonError], severity: errors.Severity
) -> None:
    """Severity is a field that travels, whatever the kind's usual one is."""
    error = kind("m", severity=severity)
    details = ((STATUS_DETAILS_KEY, status_details(error)),)
    call = FailedCall(grpc_code(error), "m", details)
    assert errors.from_data(error.to_data()).severity is severity
    assert error_from_rpc(call).severity is severity


def test_only_what_ends_the_engine_is_severe_by_itself() -> None:
    ending = [name for name, kind in errors.KINDS.items() if kind.severity.value == "engine"]
    assert sorted(ending) == ["BatonError", "ConfigError", "EngineDeadError", "InternalError"]


def test_a_peer_of_another_version_that_tells_no_severity_is_understood() -> None:
    """Status details of a release before the field existed, and of one with a new value."""
    for metadata in ({}, {"severity": "galaxy"}):
        info = error_details_pb2.ErrorInfo(
            reason="OverloadedError", domain=ERROR_DOMAIN, metadata=metadata
        )
        status = status_pb2.Status(code=8, message="full")
        status.details.add().Pack(info)
        trailers = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
        error = error_from_rpc(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers))
        assert type(error) is errors.OverloadedError
        assert error.severity is errors.Severity.REQUEST


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ServerUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelledError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.NotNowError),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError),
    ],
)
@pytest.mark.parametrize("trailers", [None, (), ((STATUS_DETAILS_KEY, b"\xff\xffgarbage"),)])
def test_a_failure_without_our_details_keeps_its_code_and_names_the_peer(
    code: grpc.StatusCode, kind: type[errors.BatonError], trailers: object
) -> None:
    """A refused connection carries no trailers; it must still read as what it is."""
    error = error_from_rpc(FailedCall(code, "refused", trailers), peer="127.0.0.1:1")
    assert type(error) is kind
    assert "127.0.0.1:1" in error.message


def test_long_values_are_shortened() -> None:
    assert len(errors.InvalidRequestError("m", value="x" * 500).value) == 80
