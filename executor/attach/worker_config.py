"""The YAML of `baton worker`: an engine, and where frontends of other processes attach to it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.config import ConfigStruct
from common.config_checks import check_name, refusal
from common.rpc import split_address
from executor.config import EngineConfig
from executor.placement import check_engine_here, engine_here


class WorkerConfig(ConfigStruct, frozen=True, kw_only=True):
    name: str = "worker-0"
    """Tells this worker from others in logs."""
    listen: str = "127.0.0.1:8301"
    """HOST:PORT where servers attach (`engine.executor.rpc_address` in their files); port 0 picks
    a free one."""
    secret_file: str
    """The cluster secret, the same on every host, mode 0600."""
    engine: EngineConfig = EngineConfig()
    shutdown_grace_s: Annotated[float, Meta(ge=0, le=600)] = 0.5
    """How long running requests may go on after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line."""

    def engine_here(self) -> EngineConfig:
        """The engine's section as it is meant on this host."""
        return engine_here(self.engine, self.listen)

    def check(self, at: str = "") -> None:
        """Raises ConfigError for what no worker can work with on this host."""
        check_name(f"{at}name", self.name)
        split_address(self.listen, f"{at}listen")
        check_engine_here(self.engine, f"{at}engine.")
        executor = self.engine.executor
        if executor.rpc_address:
            raise refusal(f"{at}engine.executor.rpc_address", executor.rpc_address, "empty here")
        if executor.form not in ("auto", "ipc", "ray"):
            raise refusal(f"{at}engine.executor.form", executor.form, "auto, ipc or ray")
