"""The router's configuration: one YAML file, see README."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from common.addresses import check_peer, same_place
from common.config import ConfigStruct
from common.config_checks import check_name, refusal
from common.logs import LogFormat
from common.rpc import split_address

PolicyName = Literal["round_robin", "least_loaded"]
SERVERS_MAX = 4096


class RouterConfig(ConfigStruct, frozen=True, kw_only=True):
    name: str = "router"
    """Tells this router from others in logs and status."""
    listen: str = "127.0.0.1:8100"
    """HOST:PORT for clients; port 0 picks a free one."""
    metrics_listen: str = ""
    """HOST:PORT for Prometheus; empty: off."""
    secret_file: str
    """The cluster secret, the same on every host, mode 0600."""
    model: str = ""
    """The model's folder or GGUF file, for its tokenizer; empty: prompts as token ids only."""
    context_servers: tuple[str, ...] = ()
    """HOST:PORT of each."""
    generation_servers: tuple[str, ...] = ()
    """HOST:PORT of each."""
    context_policy: PolicyName = "least_loaded"
    """Which server a request goes to: in turn, or where the fewest tokens are open."""
    generation_policy: PolicyName = "least_loaded"
    """The same."""
    disaggregation: Literal["always", "never"] = "always"
    """never: generation servers do both phases."""
    default_deadline_s: Annotated[float, Meta(gt=0, le=24 * 3600)] = 600.0
    """For requests that name none."""
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    """Requests served at once; one more is refused at once."""
    connections_per_server: Annotated[int, Meta(ge=1, le=256)] = 1
    """Requests take turns on them. Frontends that share a server's port have each its own
    connections, and the kernel deals them out at random: several for each are needed."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=600)] = 1.0
    """How often each server is asked how it is."""
    heartbeat_timeout_s: Annotated[float, Meta(ge=0.01, le=3600)] = 3.0
    """A server that is silent for so long counts as gone."""
    shutdown_grace_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    """How long open requests may go on after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: LogFormat = "text"
    """json: one object a line."""

    def check(self, at: str = "") -> None:
        """Raises ConfigError for values that no router can work with."""
        check_name(f"{at}name", self.name)
        split_address(self.listen, f"{at}listen")
        if self.metrics_listen:
            split_address(self.metrics_listen, f"{at}metrics_listen")
        if self.heartbeat_timeout_s < self.heartbeat_s:
            raise refusal(
                f"{at}heartbeat_timeout_s",
                self.heartbeat_timeout_s,
                f"at least heartbeat_s, {self.heartbeat_s}",
            )
        self._check_servers(at)

    def _check_servers(self, at: str) -> None:
        pools = {
            "context_servers": self.context_servers,
            "generation_servers": self.generation_servers,
        }
        seen: dict[str, str] = {}
        for pool, addresses in pools.items():
            is_needed = pool == "generation_servers" or self.disaggregation == "always"
            if is_needed and not addresses:
                raise refusal(f"{at}{pool}", [], "a list of at least one HOST:PORT")
            for index, address in enumerate(addresses):
                key = f"{at}{pool}[{index}]"
                check_peer(key, address)
                place = same_place(address)
                if place in seen:
                    raise refusal(key, address, f"listed once: {seen[place]} is the same server")
                seen[place] = key
        if len(seen) > SERVERS_MAX:
            limit = f"at most {SERVERS_MAX} servers, both lists together"
            raise refusal(f"{at}generation_servers", f"{len(seen)} servers", limit)
