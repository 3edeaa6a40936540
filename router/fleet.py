"""The servers a router knows: who lives, who can pair with whom, who carries how much.

Pure: observations in (`observe`, `report_load`, `server_down`), choices out
(`select`). Life of a server's entry, one per configured address:

    down ──observe(ready, right role)──> up ──server_down(reason)──> down
    (every other observation leaves it down, with the reason; asleep is one that is told apart)

A reservation is taken by `select` and given back by `release`, exactly once, at
the stream's true end; it belongs to the address and outlives a server's death,
so the load is always the sum of what is still open.
"""

from __future__ import annotations

from collections.abc import Sequence

from protos.errors import ServerUnavailableError
from protos.messages import Load, ModelInfo, ModelLimits, ServerInfo
from router.policies import Candidate, Policy
from router.servers import (
    Reservation,
    Role,
    Server,
    can_pair,
    least_limits,
    model_name,
    pair_faults,
    unique,
)


class Fleet:
    def __init__(
        self,
        context_servers: Sequence[str],
        generation_servers: Sequence[str],
        *,
        context_policy: Policy,
        generation_policy: Policy,
        needs_pairs: bool,
    ) -> None:
        """`needs_pairs`: whether KV is handed over, so that both roles are needed."""
        listed = [(address, Role.CONTEXT) for address in context_servers]
        listed += [(address, Role.GENERATION) for address in generation_servers]
        self._servers = {
            address: Server(address=address, role=role, arrival=arrival)
            for arrival, (address, role) in enumerate(listed)
        }
        self._policies = {Role.CONTEXT: context_policy, Role.GENERATION: generation_policy}
        self._needs_pairs = needs_pairs
        self._open: dict[int, Reservation] = {}
        self._num_reservations = 0
        self._usable: dict[Role, list[Server]] = {Role.CONTEXT: [], Role.GENERATION: []}
        self._partners: dict[str, list[Server]] = {}
        self._limits: ModelLimits | None = None
        self.was_usable = False
        """Whether requests could be served at any time."""

    # --- what the watchers saw -------------------------------------------------

    @property
    def servers(self) -> tuple[Server, ...]:
        """In order of arrival."""
        return tuple(self._servers.values())

    def observe(self, address: str, info: ServerInfo, model: ModelInfo | None) -> bool:
        """A server told who it is, and its model if it is ready. Returns whether it is up now."""
        server = self._servers[address]
        server.info, server.model = info, model or server.model
        if info.role != server.role:
            server.reason = (
                f"it says that it is a {info.role or 'nameless'} server, but {server.role}_servers "
                "lists it"
            )
        elif info.state != "ready":
            server.reason = f"{info.state}: {info.detail}" if info.detail else info.state
        elif model is None:
            server.reason = "it tells nothing of its model"
        else:
            server.reason = ""
        server.is_up = not server.reason
        server.is_asleep = info.role == server.role and info.state == "asleep"
        self._pair()
        return server.is_up

    def report_load(self, address: str, load: Load) -> None:
        """What a server says of itself; a report older than the last one is dropped."""
        server = self._servers[address]
        if load.sequence >= server.load.sequence:
            server.load = load

    def server_down(self, address: str, reason: str) -> None:
        server = self._servers[address]
        server.is_up = server.is_asleep = False
        server.reason, server.load = reason, Load()
        self._pair()

    # --- choices ------------------------------------------------------------------

    def select(self, role: Role, tokens: int, partner: str | None = None) -> Reservation:
        """Choose a server and reserve `tokens` on it.

        `partner` is the context server whose KV a generation server shall take.
        Raises ServerUnavailableError naming the role and each server's reason.
        """
        servers = self._usable[role] if partner is None else self._partners.get(partner, [])
        if not servers:
            why = self._why_none(role) if partner is None else self.why_no_partner(partner)
            raise ServerUnavailableError(why)
        seen = [Candidate(s.arrival, s.reserved_tokens, s.num_reserved) for s in servers]
        chosen = servers[self._policies[role].choose(seen)]
        self._num_reservations += 1
        reservation = Reservation(self._num_reservations, role, chosen.address, tokens)
        self._open[reservation.serial] = reservation
        chosen.reserved_tokens += tokens
        chosen.num_reserved += 1
        return reservation

    def why_no_partner(self, context: str) -> str:
        """Empty where some generation server can take this context server's KV."""
        if self._partners.get(context):
            return ""
        server = self._servers[context]
        if not server.is_up:
            return f"the context server {server.label} is gone: {server.reason}"
        return self._why_none(Role.GENERATION, context)

    def release(self, reservation: Reservation) -> None:
        held = self._open.pop(reservation.serial, None)
        assert held == reservation, f"{reservation} was released twice or never taken"
        server = self._servers[reservation.address]
        server.reserved_tokens -= reservation.tokens
        server.num_reserved -= 1

    def limits(self) -> ModelLimits:
        """What every usable pair can take. Raises ServerUnavailableError where there is none."""
        if self._limits is None:
            raise ServerUnavailableError(self._why_none(self._missing_role()))
        return self._limits

    def limited_by(self) -> str:
        """The server whose limits are the tightest, for refusals to name."""
        usable = [*self._usable[Role.CONTEXT], *self._usable[Role.GENERATION]]
        known = [server for server in usable if server.model]
        if not known:
            return "this router"

        def tightness(server: Server) -> tuple[int, int]:
            assert server.model is not None
            limits = server.model.limits
            return limits.max_total_tokens, limits.max_prompt_tokens

        return min(known, key=tightness).label

    def _missing_role(self) -> Role:
        """The role to name where nothing is usable: one without any server up, if there is one."""
        needed = (Role.CONTEXT, Role.GENERATION) if self._needs_pairs else (Role.GENERATION,)
        up = [server.role for server in self._servers.values() if server.is_up]
        return next((role for role in needed if role not in up), needed[0])

    @property
    def is_usable(self) -> bool:
        return self._limits is not None

    def server(self, address: str) -> Server:
        return self._servers[address]

    @property
    def model(self) -> ModelInfo | None:
        """Of the first usable generation server."""
        servers = self._usable[Role.GENERATION]
        return servers[0].model if servers else None

    def why_not_usable(self) -> str:
        try:
            self.limits()
        except ServerUnavailableError as error:
            return error.message
        return ""

    # --- pairing ----------------------------------------------------------------

    def _pair(self) -> None:
        """Work out anew who can serve; runs when membership changes, never per request."""
        up = [server for server in self._servers.values() if server.is_up]
        context = [server for server in up if server.role is Role.CONTEXT]
        generation = [server for server in up if server.role is Role.GENERATION]
        self._partners = {}
        if self._needs_pairs:
            pairs = [(c, g) for c in context for g in generation if can_pair(c, g)]
            # One router serves one model: that of the first pair in the configuration.
            pairs = [(c, g) for c, g in pairs if model_name(c) == model_name(pairs[0][0])]
            for c, g in pairs:
                self._partners.setdefault(c.address, []).append(g)
            context = unique(c for c, _ in pairs)
            generation = unique(g for _, g in pairs)
        else:
            generation = [g for g in generation if model_name(g) == model_name(generation[0])]
            context = []
        self._usable = {Role.CONTEXT: context, Role.GENERATION: generation}
        self._limits = least_limits(context + generation)
        self.was_usable = self.was_usable or self._limits is not None

    def _why_none(self, role: Role, partner: str | None = None) -> str:
        stories = [
            f"{server.label}: {server.reason or self._why_unpaired(server)}"
            for server in self._servers.values()
            if server.role is role
        ]
        target = f" for the KV of {self._servers[partner].label}" if partner else ""
        return f"no {role} server is usable{target}: {'; '.join(stories) or 'none is configured'}"

    def _why_unpaired(self, server: Server) -> str:
        others = [s for s in self._servers.values() if s.role is not server.role]
        up = [other for other in others if other.is_up]
        if not up:
            told = "; ".join(f"{s.label}: {s.reason}" for s in others) or "none is configured"
            return f"up, but without a partner ({told})"
        return "up, but cannot pair with " + "; ".join(
            f"{other.label}: {', '.join(pair_faults(server, other)) or 'another model is served'}"
            for other in up
        )

    def check(self) -> None:
        for server in self._servers.values():
            held = [r for r in self._open.values() if r.address == server.address]
            assert server.num_reserved == len(held), f"{server.address}: reservations miscounted"
            assert server.reserved_tokens == sum(r.tokens for r in held), server.address
            assert server.is_up == (not server.reason), f"{server.address}: up and down at once"
            assert not (server.is_up and server.is_asleep), f"{server.address}: asleep, and up"
        for role, servers in self._usable.items():
            assert all(s.is_up and s.role is role for s in servers), f"unusable {role} server"
            arrivals = [s.arrival for s in servers]
            assert arrivals == sorted(arrivals), f"{role} servers are out of order"
