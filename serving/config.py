"""One server's YAML. Each role has its own defaults for name and port."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.config import ConfigStruct
from common.config_checks import check_name
from common.rpc import split_address
from executor.config import EngineConfig
from executor.placement import check_engine_here, engine_here


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
    max_open_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def engine_here(self) -> EngineConfig:
        """The engine's section as it is meant on this host."""
        return engine_here(self.engine, self.listen)

    def check(self, at: str = "") -> None:
        """Raises ConfigError for what no server can work with on this host."""
        check_name(f"{at}name", self.name)
        split_address(self.listen, f"{at}listen")
        if self.metrics_listen:
            split_address(self.metrics_listen, f"{at}metrics_listen")
        check_engine_here(self.engine, f"{at}engine.")
