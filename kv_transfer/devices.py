"""Which network devices this host has for UCX. UCX itself ignores an unknown one in silence."""

from __future__ import annotations

import socket
from pathlib import Path

from common.config_checks import refusal

_INFINIBAND = Path("/sys/class/infiniband")


def check_net_devices(names: str, key: str = "transfer.ucx_net_devices") -> None:
    """`names` is UCX_NET_DEVICES: "lo,mlx5_0:1". Raises ConfigError for one that is not there."""
    known = host_devices()
    for name in names.removeprefix("^").split(",") if names else ():
        if name != "all" and name.partition(":")[0] not in known:
            raise refusal(key, names, f"empty or devices of this host: {', '.join(known)}")


def host_devices() -> tuple[str, ...]:
    infiniband = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.exists() else []
    return (*(name for _, name in socket.if_nameindex()), *infiniband)
