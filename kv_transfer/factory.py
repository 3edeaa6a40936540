"""Makes a transport from its name; the only place that imports UCX, and only when asked."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.devices import check_net_devices
from kv_transfer.inproc import InprocNetwork, InprocTransport
from kv_transfer.transport import Transport
from protos.errors import ConfigError

TRANSPORTS = ("ucx", "inproc")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """`tls` and `net_devices` are UCX's; `network` joins inproc transports to one another."""

    tls: str = "tcp,self,posix,cma"
    net_devices: str = ""
    close_s_max: float = 2.0
    """How long closing may take, for a peer as for the whole transport."""
    pool_address: int = 0
    pool_bytes: int = 0
    """Memory to register once, ahead of its use; 0: register as it is used."""
    network: InprocNetwork | None = None


def create_transport(name: str, settings: TransportSettings) -> Transport:
    """Raises ConfigError for an unknown name or device, or where UCX cannot be had."""
    if name == "inproc":
        return InprocTransport(settings.network or InprocNetwork())
    if name == "ucx":
        from kv_transfer.ucx import UcxTransport

        check_net_devices(settings.net_devices)

        return UcxTransport(settings)
    raise ConfigError(
        f"unknown transport {name!r}", field="transport", value=name, limit=", ".join(TRANSPORTS)
    )
