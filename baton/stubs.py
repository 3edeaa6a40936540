"""The generated gRPC stubs of one channel, sync or aio, and what calls on them carry.

The generated code has no types; this is the one place that says so, and the one
that knows gRPC's words for a server that is not there.
"""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2_grpc

from protos import control_pb2_grpc, inference_pb2_grpc
from protos.errors import BatonError, ConfigError, ServerUnavailableError
from protos.status import STATUS_DETAILS_KEY, error_from_rpc

CONTROL_TIMEOUT_S = 10.0
CONTROL_METADATA_KEY = "x-baton-control"
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the environment's proxy is for the web, not for a cluster
    # A router that was restarted is found again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

PORT_MAX = 65_535
_NOBODY = (
    "failed to connect",
    "resolution failed",
    "errors resolving",
    "no route",
    "name or service",
)


class Stubs:
    def __init__(self, channel: Any) -> None:
        inference: Any = inference_pb2_grpc.InferenceStub
        control: Any = control_pb2_grpc.ControlStub
        health: Any = health_pb2_grpc.HealthStub
        self.inference = inference(channel)
        self.control = control(channel)
        self.health = health(channel)


def control_metadata(control_token: str | None) -> tuple[tuple[str, str], ...]:
    return ((CONTROL_METADATA_KEY, control_token),) if control_token else ()


def check_address(address: str, field: str = "address") -> None:
    """Raises ConfigError for what is no HOST:PORT; a unix: address passes."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= PORT_MAX
    if not (host and is_port) and not address.startswith("unix:"):
        limit = f"HOST:PORT, port 1 to {PORT_MAX}"
        raise ConfigError(
            f"{field} is {address!r}; it must be {limit}", field=field, value=address, limit=limit
        )


def error_of_call(error: Any, address: str) -> BatonError:
    """The typed error of a failed call. Where nobody answered at all, its field is "address"."""
    told = error_from_rpc(error, address)
    details = str(error.details()).lower()
    has_answered = any(key == STATUS_DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    if (
        not isinstance(told, ServerUnavailableError)
        or has_answered
        or not any(words in details for words in _NOBODY)
    ):
        return told
    return ServerUnavailableError(
        f"nobody answers at {address}: check that the address is right and that the server runs",
        field="address",
        value=address,
    )
