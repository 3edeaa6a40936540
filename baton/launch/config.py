"""The cluster's YAML: what `baton up --config FILE` reads. configs/local.yaml shows all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.config import ConfigStruct, parse_config
from common.config_checks import refusal
from common.rpc import split_address

DEMO_MODEL = "demo"
DEFAULT_RUNTIME_DIR = ".baton"
DEFAULT_ROUTER_ADDRESS = "127.0.0.1:8000"
PORT_MAX = 65_535
SERVERS_MAX = 256

PolicyName = Literal["round_robin", "least_loaded"]
Port = Annotated[int, Meta(ge=0, le=PORT_MAX)]


class RouterSection(ConfigStruct, frozen=True, kw_only=True):
    """What is empty is left to the router's own default."""

    listen: str = DEFAULT_ROUTER_ADDRESS
    """HOST:PORT for clients; port 0 picks a free one."""
    metrics_listen: str = ""
    """HOST:PORT of /metrics; empty: off."""
    context_policy: PolicyName | None = None
    """As the router's own."""
    generation_policy: PolicyName | None = None
    """As the router's own."""
    disaggregation: Literal["always", "never"] | None = None
    """As the router's own."""
    default_deadline_s: Annotated[float, Meta(gt=0, le=24 * 3600)] | None = None
    """As the router's own."""
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """As the router's own."""
    connections_per_server: Annotated[int, Meta(ge=1, le=256)] | None = None
    """As the router's own; empty: 4 for each frontend of a server, where it has several."""


class PoolSection(ConfigStruct, frozen=True, kw_only=True):
    """All servers of one role."""

    count: Annotated[int, Meta(ge=0, le=SERVERS_MAX)] = 1
    """How many servers."""
    host: str = "127.0.0.1"
    """Where they listen."""
    first_port: Port = 0
    """The servers take ports from here on; 0: any that are free."""
    first_metrics_port: Port = 0
    """As `first_port`, for /metrics, a port for each frontend; 0: off."""
    frontends: Annotated[int, Meta(ge=1, le=64)] = 1
    """Serving processes of each server, which share its engine and its port."""
    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    """Laid over the cluster's `engine`, for this role alone."""


class ClusterConfig(ConfigStruct, frozen=True, kw_only=True):
    model: str = DEMO_MODEL
    """A Hugging Face folder, a GGUF file, or "demo"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of every engine."""
    device: str = "cpu"
    """Of every engine."""
    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    """Any key of a server's `engine` section, for both roles."""
    router: RouterSection = RouterSection()
    context: PoolSection = PoolSection()
    generation: PoolSection = PoolSection()
    runtime_dir: Annotated[str, Meta(min_length=1)] = DEFAULT_RUNTIME_DIR
    """Logs, the servers' configurations and the running cluster's state."""
    secret_file: str = ""
    """Empty: `secret` in `runtime_dir`. Made where it is missing."""
    start_timeout_s: Annotated[float, Meta(gt=0, le=24 * 3600)] = 300.0
    """Until every process must be ready."""
    stop_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """After SIGTERM; what runs still is killed then."""
    shutdown_grace_s: Annotated[float, Meta(ge=0, le=600)] = 1.0
    """How long a stopping server lets its open requests run."""

    def check(self, at: str = "") -> None:
        """Raises ConfigError for a cluster that cannot be; baton.launch.plan checks its parts."""
        split_address(self.router.listen, f"{at}router.listen")
        if self.router.metrics_listen:
            split_address(self.router.metrics_listen, f"{at}router.metrics_listen")
        if not self.generation.count:
            raise refusal(f"{at}generation.count", 0, f"1 to {SERVERS_MAX}")
        if not self.context.count and self.router.disaggregation != "never":
            limit = f"1 to {SERVERS_MAX}, or router.disaggregation never"
            raise refusal(f"{at}context.count", 0, limit)


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of `baton up` says over the file; None says nothing."""

    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    num_context: int | None = None
    num_generation: int | None = None
    port: int | None = None
    ucx_tls: str | None = None
    runtime_dir: str | None = None


def with_flags(config: ClusterConfig, flags: Flags) -> ClusterConfig:
    """The configuration with the flags laid over it. Raises ConfigError for a bad one."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    over: dict[str, Any] = {
        "model": flags.model,
        "dtype": flags.dtype,
        "device": flags.device,
        "runtime_dir": flags.runtime_dir,
        "context": {"count": flags.num_context},
        "generation": {"count": flags.num_generation},
        "engine": {"transfer": {"ucx_tls": flags.ucx_tls}},
    }
    if flags.port is not None:
        host = config.router.listen.rpartition(":")[0]
        over["router"] = {"listen": f"{host}:{flags.port}"}
    return parse_config(merge(data, _given(over)), ClusterConfig, source="the command line")


def _given(data: Any) -> Any:
    """Without what is None, and without sections that then are empty."""
    if not isinstance(data, dict):
        return data
    kept = {key: _given(value) for key, value in data.items() if value is not None}
    return {key: value for key, value in kept.items() if value != {}}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, section by section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        result[key] = value
    return result
