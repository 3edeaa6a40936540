"""The router's configuration: one YAML file, see README."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from common.config import ConfigStruct, load_config
from common.logs import LogFormat
from common.rpc import split_address
from protos.errors import ConfigError

PolicyName = Literal["round_robin", "least_loaded"]
SERVERS_MAX = 4096


class RouterConfig(ConfigStruct, frozen=True, kw_only=True):
    name: str = "router"
    listen: str = "127.0.0.1:8100"
    metrics_listen: str = ""
    """HOST:PORT for Prometheus; empty: off."""
    secret_file: str
    model: str = ""
    """The model's folder or GGUF file, for its tokenizer; empty: prompts as token ids only."""
    context_servers: tuple[str, ...] = ()
    generation_servers: tuple[str, ...] = ()
    context_policy: PolicyName = "least_loaded"
    generation_policy: PolicyName = "least_loaded"
    disaggregation: Literal["always", "never"] = "always"
    """never: generation servers do both phases."""
    default_deadline_s: float = 600.0
    """For requests that name none."""
    max_in_flight: int = 1024
    """Requests served at once; one more is refused at once."""
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 3.0
    """A server that is silent for so long counts as gone."""
    shutdown_grace_s: float = 5.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"


def load_router_config(path: Path) -> RouterConfig:
    """Raises ConfigError, naming the key, for a file that cannot work."""
    config = load_config(path, RouterConfig)
    check_router_config(config)
    return config


def check_router_config(config: RouterConfig) -> None:
    """Raises ConfigError for values that no router can work with."""
    split_address(config.listen)
    if config.metrics_listen:
        split_address(config.metrics_listen, "metrics_listen")
    _check_positive(config)
    _check_servers(config)


def _check_positive(config: RouterConfig) -> None:
    for field in ("default_deadline_s", "max_in_flight", "heartbeat_s", "heartbeat_timeout_s"):
        value = getattr(config, field)
        if not value > 0:
            raise ConfigError(
                f"{field} is {value}; it must be over 0", field=field, value=value, limit="> 0"
            )
    if not config.shutdown_grace_s >= 0:
        raise ConfigError(
            f"shutdown_grace_s is {config.shutdown_grace_s}; it must be at least 0",
            field="shutdown_grace_s",
            value=config.shutdown_grace_s,
            limit=">= 0",
        )


def _check_servers(config: RouterConfig) -> None:
    needed = {"generation_servers": config.generation_servers}
    if config.disaggregation == "always":
        needed["context_servers"] = config.context_servers
    for field, addresses in needed.items():
        if not addresses:
            raise ConfigError(
                f"{field} is empty; list at least one HOST:PORT", field=field, limit="1 or more"
            )
    seen: dict[str, str] = {}
    for field in ("context_servers", "generation_servers"):
        for address in getattr(config, field):
            split_address(address, field)
            if address in seen:
                raise ConfigError(
                    f"{field} lists {address}, which {seen[address]} lists already",
                    field=field,
                    value=address,
                )
            seen[address] = field
    if len(seen) > SERVERS_MAX:
        raise ConfigError(
            f"{len(seen)} servers are listed; at most {SERVERS_MAX} are supported",
            field="context_servers",
            value=len(seen),
            limit=SERVERS_MAX,
        )
