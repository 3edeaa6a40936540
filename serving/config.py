"""One server's YAML. Each role has its own defaults for name and port."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.config import ConfigStruct
from common.config_checks import check_name, refusal
from common.rpc import split_address
from executor.config import EngineConfig
from executor.placement import check_engine_here, engine_here

FRONTENDS_MAX = 64
PORT_MAX = 65_535


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
    frontends: Annotated[int, Meta(ge=1, le=FRONTENDS_MAX)] = 1
    """Processes that serve gRPC on one port and share the engine; each has metrics of its own,
    from `metrics_listen` upwards. Over 1 not together with `engine.executor.rpc_address`: start
    several servers instead."""
    shutdown_grace_s: Annotated[float, Meta(ge=0, le=600)] = 0.5
    """How long open streams may go on after SIGTERM."""
    max_open_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """One more is refused at once."""
    max_unread_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    """A stream whose client falls further behind than the connection's buffers and so many tokens
    is ended with SlowConsumerError; 0: it costs its own answer's length and goes on."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line."""

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
        if self.frontends > 1:
            self._check_frontends(at)

    def _check_frontends(self, at: str) -> None:
        form = self.engine.executor.form
        if form == "single":
            raise refusal(f"{at}frontends", self.frontends, "1 with engine.executor.form single")
        if self.engine.executor.rpc_address:
            limit = "1 with engine.executor.rpc_address: start one server for each"
            raise refusal(f"{at}frontends", self.frontends, limit)
        if self.metrics_listen:
            first = split_address(self.metrics_listen)[1]
            if first and first + self.frontends - 1 > PORT_MAX:
                limit = f"a port up to {PORT_MAX + 1 - self.frontends}, one for each frontend"
                raise refusal(f"{at}metrics_listen", self.metrics_listen, limit)
