"""The error tree crosses queues and gRPC without losing its kind, its fault or its numbers."""

from __future__ import annotations

import grpc
import pytest

from protos import errors
from protos.status import STATUS_DETAILS_KEY, error_from_rpc, grpc_code, status_details


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


def test_a_kind_from_a_newer_peer_becomes_internal() -> None:
    data = errors.ErrorData(kind="FromTheFutureError", message="m")
    assert type(errors.from_data(data)) is errors.InternalError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ServerUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelledError),
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
