"""Where and with which key a frontend attaches: what it must be told before it can ask.

For the cluster's own worker worlds (form "rpc") both come from the configuration and the secret
file; a frontend that a launcher started (form "attach") inherits a descriptor to read them from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.rpc import split_address
from common.security import ClusterSecret
from executor.attach.keys import AttachKeys
from executor.config import EngineConfig
from protos.errors import ConfigError

ATTACH_PURPOSE = b"attach"
WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104 - only told apart here


@dataclass(frozen=True, kw_only=True)
class AttachPoint:
    """`where` is the endpoint as it is told to people."""

    form: Literal["rpc", "attach"]
    endpoint: str
    keys: AttachKeys
    where: str

    @property
    def host(self) -> str:
        """Of a tcp endpoint; "" on ipc."""
        scheme, _, rest = self.endpoint.partition("://")
        return rest.rpartition(":")[0] if scheme == "tcp" else ""


def cluster_keys(secret: ClusterSecret) -> AttachKeys:
    return AttachKeys(secret.derive(ATTACH_PURPOSE))


def rpc_point(config: EngineConfig, secret: ClusterSecret) -> AttachPoint | None:
    """None where the configuration names no world elsewhere. Raises ConfigError."""
    address = config.executor.rpc_address
    if not address:
        return None
    host, port = split_address(address, "engine.executor.rpc_address")
    if port == 0 or host.strip("[]") in WILDCARDS:
        raise ConfigError(
            f"engine.executor.rpc_address is {address!r}; it must be where a `baton worker` "
            "listens, such as 10.0.0.5:8301",
            field="engine.executor.rpc_address",
            value=address,
            limit="HOST:PORT of one host",
        )
    return AttachPoint(
        form="rpc", endpoint=f"tcp://{address}", keys=cluster_keys(secret), where=address
    )
