"""What every gRPC server of ours does alike: addresses, binding, errors, health, reflection.

The router and both roles' servers stand on it.
"""

from __future__ import annotations

import os
import socket
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.decode_guard import DecodeGuard
from common.security import CONTROL_METADATA_KEY, ClusterSecret
from protos import control_pb2_grpc, inference_pb2_grpc
from protos.errors import BatonError, ConfigError, shorten
from protos.status import STATUS_DETAILS_KEY, grpc_code, status_details

MESSAGE_BYTES_MAX = 16 << 20
SERVICES = ("baton.v1.Inference", "baton.v1.Control")
STATUS_LENGTH_MAX = 1000
LIVENESS = "liveness"
READINESS = "readiness"

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a client whose network is cut is found by these pings
    ("grpc.keepalive_timeout_ms", 10_000),
)


def split_address(listen: str, field: str = "listen") -> tuple[str, int]:
    """HOST:PORT apart. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(
            f"{field} is {listen!r}; it must be HOST:PORT with a port from 0 to 65535, "
            "such as 127.0.0.1:8101",
            field=field,
            value=listen,
            limit="HOST:PORT",
        )
    return host, int(port)


def new_server(*, shares_port: bool = False) -> grpc.aio.Server:
    """Two servers on one port must fail, not share it, unless they are meant to."""
    options = (("grpc.so_reuseport", int(shares_port)), *_SERVER_OPTIONS)
    return grpc.aio.server(options=options, interceptors=(DecodeGuard(fail),))


def add_services(server: grpc.aio.Server, inference: object, control: object) -> None:
    """Both services of ours, whose generated stubs bear no types."""
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
    control_pb2_grpc.add_ControlServicer_to_server(control, server)  # type: ignore[no-untyped-call]


def bind(
    server: grpc.aio.Server, listen: str, field: str = "listen", *, shares_port: bool = False
) -> str:
    """Take the port; returns HOST:PORT with the real port. Raises ConfigError."""
    host, wanted = split_address(listen, field)
    why = "" if shares_port else _trouble_with(host, wanted)
    try:
        port = 0 if why else server.add_insecure_port(listen)
    except RuntimeError as error:
        why = str(error)
    if why:
        raise _cannot_listen(listen, why, field)
    return f"{host}:{port}"


def hold_port(listen: str, field: str = "listen") -> tuple[socket.socket, str]:
    """Keep a port for servers that will share it: a socket that takes no connections, and
    HOST:PORT with the real port. Raises ConfigError where others have it."""
    host, wanted = split_address(listen, field)
    why = _trouble_with(host, wanted)
    if why:
        raise _cannot_listen(listen, why, field)
    name = host.strip("[]")
    holder = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((name, wanted))
    except OSError as error:
        holder.close()
        raise _cannot_listen(listen, _words_of(error), field) from None
    return holder, f"{host}:{holder.getsockname()[1]}"


def _cannot_listen(listen: str, why: str, field: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {listen}: {why}; set {field} to a free port of this host (0 picks "
        "one), or stop what uses this one (ss -ltnp shows it)",
        field=field,
        value=listen,
    )


def _trouble_with(host: str, port: int) -> str:
    """Why an address cannot be had, "" if it can: gRPC itself says it in a log line of its own."""
    name = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        with socket.create_server((name, port), family=family):
            return ""
    except OSError as error:
        return _words_of(error)


def _words_of(error: OSError) -> str:
    is_plain = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0).lower() if is_plain else (error.strerror or str(error))


async def fail(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """End a call by our error, with its details in the trailer.

    Only the message's first line travels: gRPC drops a trailer of many
    kilobytes, and a dead worker's last log lines are not for clients.
    """
    line = shorten(error.message.partition("\n")[0], STATUS_LENGTH_MAX)
    told = type(error)(line, field=error.field, value=error.value, limit=error.limit)
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, status_details(told)),))
    await context.abort(grpc_code(told), told.message)
    raise AssertionError("abort always raises")


def metadata_value(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str:
    """A call's metadata under a key, "" where absent."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def check_control(context: grpc.aio.ServicerContext[Any, Any], secret: ClusterSecret) -> None:
    """Raises AccessDeniedError where the call bears no valid control token."""
    secret.verify_control(metadata_value(context, CONTROL_METADATA_KEY))


class Health:
    """grpc.health.v1 with liveness and readiness apart.

    "liveness" says whether a restart would help; "readiness", "" and the two
    services say whether requests are taken. All start as not serving, but for
    liveness.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        self._status: dict[str, int] = {}
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, is_ready: bool) -> None:
        for service in ("", READINESS, *SERVICES):
            await self._set(service, is_ready)

    async def set_live(self, is_live: bool) -> None:
        await self._set(LIVENESS, is_live)

    async def _set(self, service: str, is_good: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_good else response.NOT_SERVING
        if self._status.get(service) != status:
            self._status[service] = status
            await self._servicer.set(service, status)


def enable_reflection(server: grpc.aio.Server) -> None:
    names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
