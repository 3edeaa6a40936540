"""What every process that starts an engine on this host settles the same way."""

from __future__ import annotations

import msgspec

from common.addresses import is_loopback
from common.config_checks import refusal
from executor.config import EngineConfig
from kv_transfer.devices import check_net_devices

LOOPBACK_DEVICE = "lo"


def engine_here(engine: EngineConfig, listen: str) -> EngineConfig:
    """The engine's section as it is meant on this host.

    A server that serves on the loopback address alone must not open its data plane to the
    network: UCX then gets the loopback device, unless the file names devices itself.
    """
    transfer = engine.transfer
    if transfer.ucx_net_devices or not is_loopback(listen):
        return engine
    transfer = msgspec.structs.replace(transfer, ucx_net_devices=LOOPBACK_DEVICE)
    return msgspec.structs.replace(engine, transfer=transfer)


def check_engine_here(engine: EngineConfig, at: str) -> None:
    """Raises ConfigError for what no server can work with on this host."""
    engine.check(at)
    if engine.transfer.transport == "inproc":
        limit = "ucx: inproc joins engines of one process only"
        raise refusal(f"{at}transfer.transport", "inproc", limit)
    check_net_devices(engine.transfer.ucx_net_devices, f"{at}transfer.ucx_net_devices")
