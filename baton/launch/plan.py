"""From a cluster's configuration to each process's own. Pure: no files, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.launch.config import ClusterConfig, PoolSection, merge
from common.config import parse_config
from executor.config import EngineConfig
from protos.errors import ConfigError

PORT_MAX = 65_535
SERVERS_MAX = 256
_CLUSTER_KEYS = ("model", "dtype", "device")


@dataclass(frozen=True)
class ProcessPlan:
    """One process: `module` is run with `config` as its YAML."""

    name: str
    role: str
    module: str
    config: Mapping[str, Any]


def plan_servers(
    config: ClusterConfig, *, model: str, secret_file: Path, num_cores: int
) -> tuple[ProcessPlan, ...]:
    """Context servers, then generation servers. Raises ConfigError."""
    pools = (("context", config.context), ("generation", config.generation))
    for role, pool in pools:
        if not 0 <= pool.count <= SERVERS_MAX:
            raise _out_of_range(f"{role}.count", pool.count, f"0 to {SERVERS_MAX}")
    num_engines = config.context.count + config.generation.count
    if not config.generation.count:
        raise _out_of_range("generation.count", 0, "at least 1")
    num_threads = max(1, num_cores // num_engines)
    return tuple(
        ProcessPlan(
            name=f"{role}-{index}",
            role=role,
            module=f"{role}_server",
            config={
                "name": f"{role}-{index}",
                "listen": _address(role, "first_port", pool, index),
                "metrics_listen": _metrics_address(role, pool, index),
                "secret_file": str(secret_file),
                "shutdown_grace_s": config.shutdown_grace_s,
                "engine": _engine(config, role, pool, model, num_threads),
            },
        )
        for role, pool in pools
        for index in range(pool.count)
    )


def plan_router(
    config: ClusterConfig,
    *,
    model: str,
    secret_file: Path,
    context_servers: Sequence[str],
    generation_servers: Sequence[str],
) -> ProcessPlan:
    section = msgspec.to_builtins(config.router)
    return ProcessPlan(
        name="router",
        role="router",
        module="router",
        config={
            "name": "router",
            **{key: value for key, value in section.items() if value is not None},
            "secret_file": str(secret_file),
            "model": model,
            "context_servers": list(context_servers),
            "generation_servers": list(generation_servers),
            "shutdown_grace_s": config.shutdown_grace_s,
        },
    )


def listen_addresses(config: ClusterConfig) -> tuple[tuple[str, str], ...]:
    """(key, HOST:PORT) of all that will be listened on; port 0 is any that is free."""
    found = [
        ("router.listen", config.router.listen),
        ("router.metrics_listen", config.router.metrics_listen),
    ]
    for role, pool in (("context", config.context), ("generation", config.generation)):
        for index in range(pool.count):
            found.append((f"{role}.first_port", _address(role, "first_port", pool, index)))
            found.append((f"{role}.first_metrics_port", _metrics_address(role, pool, index)))
    return tuple((key, address) for key, address in found if address)


def _engine(
    config: ClusterConfig, role: str, pool: PoolSection, model: str, num_threads: int
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
    merged = merge(merge(base, config.engine), pool.engine)
    parse_config(merged, EngineConfig, source=f"the engine of the {role} servers")
    return merged


def _address(role: str, key: str, pool: PoolSection, index: int) -> str:
    first: int = getattr(pool, key)
    port = first + index if first else 0
    if not 0 <= port <= PORT_MAX:
        raise _out_of_range(f"{role}.{key}", first, f"0 to {PORT_MAX - index}")
    return f"{pool.host}:{port}"


def _metrics_address(role: str, pool: PoolSection, index: int) -> str:
    return _address(role, "first_metrics_port", pool, index) if pool.first_metrics_port else ""


def _out_of_range(key: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"{key} is {value}; it must be {limit}", field=key, value=value, limit=limit)
