"""What a launcher tells a frontend that it starts: its seat, and where the engine is.

It goes down the frontend's inherited descriptor, never argv or the environment: it holds the key.
"""

from __future__ import annotations

import os

import msgspec

from common.rpc import split_address
from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint
from executor.ipc import sweep_folders
from protos.errors import EngineDeadError
from serving.config import ServerConfig


class FrontOrders(msgspec.Struct, frozen=True, kw_only=True):
    """`listen` is the port that all frontends share, by its real number."""

    launcher_pid: int
    index: int
    listen: str
    metrics_listen: str
    endpoint: str
    key_id: str
    key: bytes

    @classmethod
    def of(cls, config: ServerConfig, index: int, listen: str, point: AttachPoint) -> FrontOrders:
        key_id = point.keys.first_id
        return cls(
            launcher_pid=os.getpid(),
            index=index,
            listen=listen,
            metrics_listen=_metrics_listen(config.metrics_listen, index),
            endpoint=point.endpoint,
            key_id=key_id,
            key=point.keys.keys[key_id],
        )

    def check_launcher(self) -> None:
        """Raises EngineDeadError where it was gone before its death could be noticed."""
        if os.getppid() != self.launcher_pid:
            sweep_folders()
            raise EngineDeadError("the launcher of this frontend is gone, and its engine with it")

    @property
    def point(self) -> AttachPoint:
        keys = AttachKeys({self.key_id: self.key})
        return AttachPoint(form="attach", endpoint=self.endpoint, keys=keys, where=self.endpoint)

    def seat(self, config: ServerConfig) -> ServerConfig:
        """The server's configuration as it is meant for this frontend."""
        return msgspec.structs.replace(
            config, listen=self.listen, metrics_listen=self.metrics_listen
        )


def _metrics_listen(listen: str, index: int) -> str:
    """A port for each, counted up; 0 stays any."""
    if not listen:
        return ""
    host, port = split_address(listen, "metrics_listen")
    return f"{host}:{port + index if port else 0}"


def pack_orders(orders: FrontOrders) -> bytes:
    return msgspec.msgpack.encode(orders)


def read_orders(descriptor: int) -> FrontOrders:
    """All that comes until the launcher closes its end. The descriptor stays open: it may be
    standard input, whose number nothing else should get."""
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return msgspec.msgpack.decode(file.read(), type=FrontOrders)
