"""One server's YAML. Each role has its own defaults for name and port."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.config import ConfigStruct
from executor.config import EngineConfig


class ServerConfig(ConfigStruct, frozen=True, kw_only=True):
    """Paths are taken from the working directory of the process."""

    name: str
    """Tells this server from others in logs, status and hand-offs."""
    listen: str
    """HOST:PORT for gRPC; port 0 picks a free one."""
    secret_file: str
    """The cluster secret, the same on every host, mode 0600."""
    metrics_listen: str = ""
    """HOST:PORT for Prometheus; empty: off."""
    engine: EngineConfig = EngineConfig()
    shutdown_grace_s: Annotated[float, Meta(ge=0, le=600)] = 0.5
    """How long open streams may go on after SIGTERM."""
    max_open_requests: Annotated[int, Meta(ge=1)] = 4096
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
