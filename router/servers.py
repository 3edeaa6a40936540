"""What the router knows of one server, and which two servers can work together.

Plain data and pure functions; `router.fleet` owns the entries.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protos.messages import KvLayout, Load, ModelInfo, ModelLimits, ServerInfo


class Role(enum.StrEnum):
    CONTEXT = "context"
    GENERATION = "generation"


@dataclass(frozen=True, slots=True)
class Reservation:
    """One leg's share of a server, until the leg's stream has ended."""

    serial: int
    role: Role
    address: str
    tokens: int


@dataclass(slots=True)
class Server:
    """What is known of one address. `info` and `model` outlive a death: status shows them."""

    address: str
    role: Role
    arrival: int
    is_up: bool = False
    """Whether it takes requests."""
    is_asleep: bool = False
    """It answers, and takes none until it is woken."""
    reason: str = "not reached yet"
    info: ServerInfo | None = None
    model: ModelInfo | None = None
    load: Load = field(default_factory=Load)
    reserved_tokens: int = 0
    num_reserved: int = 0

    @property
    def label(self) -> str:
        name = self.info.name if self.info else ""
        return f"{name} ({self.address})" if name else self.address


_LAYOUT_FIELDS = (
    "dtype",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "tokens_per_block",
    "model_fingerprint",
    "tp_size",
    "pp_size",
    "layout_version",
)


def incompatibilities(context: ServerInfo, generation: ServerInfo) -> list[str]:
    """Why KV cannot go from one to the other; empty where it can."""
    found = _differences(("model", "transport"), context, generation)
    if context.layout is None or generation.layout is None:
        return [*found, "a server that tells no KV layout"]
    return found + _differences(_LAYOUT_FIELDS, context.layout, generation.layout)


def _differences(
    names: Sequence[str], context: ServerInfo | KvLayout, generation: ServerInfo | KvLayout
) -> list[str]:
    return [
        f"{name} {getattr(context, name)!r} against {getattr(generation, name)!r}"
        for name in names
        if getattr(context, name) != getattr(generation, name)
    ]


def model_name(server: Server) -> str:
    return server.info.model if server.info else ""


def pair_faults(one: Server, other: Server) -> list[str]:
    assert one.info is not None
    assert other.info is not None
    if one.role is Role.CONTEXT:
        return incompatibilities(one.info, other.info)
    return incompatibilities(other.info, one.info)


def can_pair(context: Server, generation: Server) -> bool:
    return not pair_faults(context, generation)


def unique(servers: Iterable[Server]) -> list[Server]:
    """Each once, by arrival."""
    by_arrival = {server.arrival: server for server in servers}
    return [by_arrival[arrival] for arrival in sorted(by_arrival)]


def least_limits(servers: Sequence[Server]) -> ModelLimits | None:
    """The tightest of every limit, so that any pair can take what passes it."""
    limits = [server.model.limits for server in servers if server.model]
    if not limits:
        return None
    return ModelLimits(
        model=limits[0].model,
        vocab_size=min(one.vocab_size for one in limits),
        max_prompt_tokens=min(one.max_prompt_tokens for one in limits),
        max_total_tokens=min(one.max_total_tokens for one in limits),
        eos_token_ids=limits[0].eos_token_ids,
    )
