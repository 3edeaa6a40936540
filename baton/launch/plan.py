"""From a cluster's configuration to each process's own. Pure: no files, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.launch.config import PORT_MAX, ClusterConfig, PoolSection, merge
from common.config import parse_config
from common.config_checks import refusal
from context_server.config import ContextServerConfig
from generation_server.config import GenerationServerConfig
from protos.errors import ConfigError
from router.config import RouterConfig
from serving.config import ServerConfig

CONNECTIONS_PER_FRONTEND = 4
"""The kernel deals connections out at random: so few frontends stay without one."""
_CLUSTER_KEYS = ("model", "dtype", "device")
_SCHEMAS: Mapping[str, type[ServerConfig]] = {
    "context": ContextServerConfig,
    "generation": GenerationServerConfig,
}


@dataclass(frozen=True)
class ProcessPlan:
    """One process: `module` is run with `config` as its YAML."""

    name: str
    role: str
    module: str
    config: Mapping[str, Any]


def check_plans(config: ClusterConfig) -> None:
    """Raises ConfigError where any process would refuse what it is going to be given."""
    plan_servers(config, model="model", secret_file=Path("secret"), num_cores=1)
    num_context, num_generation = config.context.count, config.generation.count
    addresses = [f"127.0.0.1:{port}" for port in range(1, num_context + num_generation + 1)]
    plan_router(
        config,
        model="model",
        secret_file=Path("secret"),
        context_servers=addresses[:num_context],
        generation_servers=addresses[num_context:],
    )


def plan_servers(
    config: ClusterConfig, *, model: str, secret_file: Path, num_cores: int
) -> tuple[ProcessPlan, ...]:
    """Context servers, then generation servers. Raises ConfigError."""
    pools = (("context", config.context), ("generation", config.generation))
    num_threads = max(1, num_cores // (config.context.count + config.generation.count))
    return tuple(
        _server_plan(
            role,
            {
                "name": f"{role}-{index}",
                "listen": _address(role, "first_port", pool, index),
                "metrics_listen": _metrics_address(role, pool, index),
                "secret_file": str(secret_file),
                "shutdown_grace_s": config.shutdown_grace_s,
                "frontends": pool.frontends,
                "engine": _engine(config, pool, model, num_threads),
            },
        )
        for role, pool in pools
        for index in range(pool.count)
    )


def _server_plan(role: str, config: Mapping[str, Any]) -> ProcessPlan:
    parse_config(config, _SCHEMAS[role], source=f"the {role} servers")
    return ProcessPlan(name=config["name"], role=role, module=f"{role}_server", config=config)


def plan_router(
    config: ClusterConfig,
    *,
    model: str,
    secret_file: Path,
    context_servers: Sequence[str],
    generation_servers: Sequence[str],
) -> ProcessPlan:
    """Raises ConfigError."""
    section = msgspec.to_builtins(config.router)
    num_frontends = max(config.context.frontends, config.generation.frontends)
    router = {
        "name": "router",
        "connections_per_server": CONNECTIONS_PER_FRONTEND * num_frontends
        if num_frontends > 1
        else 1,
        **{key: value for key, value in section.items() if value is not None},
        "secret_file": str(secret_file),
        "model": model,
        "context_servers": list(context_servers),
        "generation_servers": list(generation_servers),
        "shutdown_grace_s": config.shutdown_grace_s,
    }
    parse_config(router, RouterConfig, source="the router")
    return ProcessPlan(name="router", role="router", module="router", config=router)


def listen_addresses(config: ClusterConfig) -> tuple[tuple[str, str], ...]:
    """(key, HOST:PORT) of all that will be listened on; port 0 is any that is free."""
    found = [
        ("router.listen", config.router.listen),
        ("router.metrics_listen", config.router.metrics_listen),
    ]
    for role, pool in (("context", config.context), ("generation", config.generation)):
        for index in range(pool.count):
            found.append((f"{role}.first_port", _address(role, "first_port", pool, index)))
            found += _metrics_addresses(role, pool, index)
    return tuple((key, address) for key, address in found if address)


def _engine(
    config: ClusterConfig, pool: PoolSection, model: str, num_threads: int
) -> dict[str, Any]:
    for key in _CLUSTER_KEYS:
        if key in config.engine or key in pool.engine:
            raise ConfigError(
                f"engine.{key} does not belong in a cluster's engine section: set {key} at the "
                "file's top level, so that all servers agree",
                field=f"engine.{key}",
            )
    base = {
        "model": model,
        "dtype": config.dtype,
        "device": config.device,
        "num_threads": num_threads,
    }
    return merge(merge(base, config.engine), pool.engine)


def _address(role: str, key: str, pool: PoolSection, index: int) -> str:
    first: int = getattr(pool, key)
    port = first + index if first else 0
    if not 0 <= port <= PORT_MAX:
        raise refusal(f"{role}.{key}", first, f"0 to {PORT_MAX - index}")
    return f"{pool.host}:{port}"


def _metrics_addresses(role: str, pool: PoolSection, index: int) -> list[tuple[str, str]]:
    """(key, HOST:PORT) of every frontend of one server."""
    if not pool.first_metrics_port:
        return []
    key = "first_metrics_port"
    first = index * pool.frontends
    places = range(first, first + pool.frontends)
    return [(f"{role}.{key}", _address(role, key, pool, place)) for place in places]


def _metrics_address(role: str, pool: PoolSection, index: int) -> str:
    """Of the first of its frontends."""
    if not pool.first_metrics_port:
        return ""
    return _address(role, "first_metrics_port", pool, index * pool.frontends)
