"""The broker's decisions, pure: who may attach, under which number, and whose lane goes.

    knocked -> challenged -> OPENING -> OPEN -> gone
                                └─────────────────^

A challenge costs no memory: its cookie tells when it was made, and for whom, under a key of the
broker's own. A cookie serves once and for a while; so neither a recorded knock nor a recorded
request opens anything. Numbers of frontends are never given out twice in a world's life.
"""

from __future__ import annotations

import enum
import hmac
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from executor.attach.broker_events import (
    Answer,
    Asked,
    CloseLane,
    Effect,
    Event,
    Knocked,
    LaneGone,
    LaneOpen,
    LaneRefused,
    Left,
    OpenLane,
    ProcessGone,
    Tell,
    Unwatch,
    Watch,
    WorldDown,
    WorldUp,
)
from executor.attach.keys import lane_key
from executor.attach.messages import (
    PROTOCOL,
    WORDS_LENGTH_MAX,
    Attach,
    Attached,
    Challenge,
    FromBroker,
    GoodbyeAck,
    Refused,
    Wait,
    WorldEnded,
)
from protos.errors import (
    BatonError,
    ConfigError,
    EngineDeadError,
    OverloadedError,
    from_data,
    shorten,
)

FRONTENDS_END = 1 << 16
COOKIE_HEAD_BYTES = 16
COOKIE_TAG_BYTES = 16
BEATS_PER_SILENCE = 3
BEAT_S_MAX = 600.0
BUCKETS_MAX = 64


class Phase(enum.StrEnum):
    OPENING = "opening"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerBounds:
    cookie_s: float = 10.0
    """How long a challenge may be answered."""
    used_cookies_max: int = 1024
    opening_max: int = 64
    frontends_max: int = 1000
    heartbeat_s: float = 1.0
    silence_s: float = 10.0


@dataclass(slots=True)
class Frontend:
    frontend_id: int
    route: bytes
    key_id: str
    request: Attach
    key: bytes = field(repr=False)
    silence_s: float
    phase: Phase = Phase.OPENING


@dataclass(slots=True)
class BrokerTable:
    """`cookie_key` is random and of this table's life. `keys`: the attach keys by id."""

    keys: Mapping[str, bytes] = field(repr=False)
    cookie_key: bytes = field(repr=False)
    bounds: BrokerBounds = field(default_factory=BrokerBounds)
    num_attached: int = 0
    num_refused: int = 0
    num_forged: int = 0
    """Cookies that were not made here, or for somebody else."""
    num_stale: int = 0
    num_replayed: int = 0
    num_unknown: int = 0
    """News of frontends that are not there any more."""
    _frontends: dict[int, Frontend] = field(default_factory=dict)
    _used: dict[bytes, None] = field(default_factory=dict)
    _used_until: deque[tuple[float, bytes]] = field(default_factory=deque)
    _next_id: int = 1
    _num_cookies: int = 0
    _world: WorldUp | None = None
    _cause: str = ""

    # --- what is known --------------------------------------------------------

    def frontend(self, frontend_id: int) -> Frontend | None:
        return self._frontends.get(frontend_id)

    def __len__(self) -> int:
        return len(self._frontends)

    def counters(self) -> dict[str, int]:
        return {
            "frontends": len(self._frontends),
            "attached": self.num_attached,
            "refused": self.num_refused,
            "forged": self.num_forged,
            "stale": self.num_stale,
            "replayed": self.num_replayed,
            "unknown": self.num_unknown,
        }

    def check(self) -> None:
        """Raises AssertionError where the books contradict themselves."""
        bounds = self.bounds
        assert 1 <= self._next_id <= FRONTENDS_END
        assert all(key == f.frontend_id < self._next_id for key, f in self._frontends.items())
        assert list(self._used) == [cookie for _, cookie in self._used_until]
        assert len(self._used) <= bounds.used_cookies_max
        assert len(self._frontends) <= bounds.frontends_max
        assert self._num_opening() <= bounds.opening_max
        assert not self._frontends or (self._world is not None and not self._cause)

    # --- the machine ----------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Knocked():
                return [Answer(event.route, event.key_id, self._on_knock(event, now_s))]
            case Asked():
                return self._on_asked(event, now_s)
            case LaneOpen() | LaneRefused():
                return self._on_lane(event)
            case Left() | LaneGone() | ProcessGone():
                return self._on_gone(event)
            case WorldUp():
                self._world = event
                return []
            case WorldDown():
                return self._on_world_down(event.cause)
            case _:
                assert_never(event)

    # --- attaching ------------------------------------------------------------

    def _on_knock(self, event: Knocked, now_s: float) -> FromBroker:
        message = event.message
        if message.protocol != PROTOCOL:
            return self._refusal(
                message.nonce,
                ConfigError(
                    f"the frontend speaks attach protocol {message.protocol}, this world "
                    f"{PROTOCOL}: run the same version of Baton on both sides",
                    field="protocol",
                    value=message.protocol,
                    limit=PROTOCOL,
                ),
            )
        hindrance = self._hindrance(message.nonce, now_s)
        if hindrance is not None:
            return hindrance
        self._num_cookies += 1
        issued_us = int(now_s * 1e6)
        head = issued_us.to_bytes(8, "little") + self._num_cookies.to_bytes(8, "little")
        return Challenge(message.nonce, head + self._cookie_tag(head, event, message.nonce))

    def _cookie_tag(self, head: bytes, event: Knocked | Asked, nonce: bytes) -> bytes:
        """For this connection, key and nonce alone."""
        parts = (head, event.route, event.key_id.encode(), nonce)
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self.cookie_key, message, "sha256")[:COOKIE_TAG_BYTES]

    def _on_asked(self, event: Asked, now_s: float) -> list[Effect]:
        message = event.message
        if not self._is_good(event, now_s):
            return []
        hindrance = self._hindrance(message.nonce, now_s)
        if hindrance is not None:
            return [Answer(event.route, event.key_id, hindrance)]
        self._used[message.cookie] = None
        self._used_until.append((now_s + self.bounds.cookie_s, message.cookie))
        frontend_id = self._next_id
        self._next_id += 1
        key = lane_key(self.keys[event.key_id], message.nonce, message.cookie, frontend_id)
        beat_s = min(max(message.beat_s, 0.0), BEAT_S_MAX)
        silence_s = max(self.bounds.silence_s, BEATS_PER_SILENCE * beat_s)
        self._frontends[frontend_id] = Frontend(
            frontend_id, event.route, event.key_id, message, key, silence_s
        )
        num_buckets = min(max(message.num_buckets, 0), BUCKETS_MAX)
        return [OpenLane(frontend_id, key, silence_s, num_buckets)]

    def _is_good(self, event: Asked, now_s: float) -> bool:
        """Its cookie is ours, for this very caller, young, and has not served yet."""
        cookie = event.message.cookie
        head, tag = cookie[:COOKIE_HEAD_BYTES], cookie[COOKIE_HEAD_BYTES:]
        if not hmac.compare_digest(tag, self._cookie_tag(head, event, event.message.nonce)):
            self.num_forged += 1
            return False
        if now_s - int.from_bytes(head[:8], "little") / 1e6 > self.bounds.cookie_s:
            self.num_stale += 1
            return False
        if cookie in self._used:
            self.num_replayed += 1
            return False
        return True

    def _hindrance(self, nonce: bytes, now_s: float) -> FromBroker | None:
        """Why nobody can be let in now."""
        while self._used_until and self._used_until[0][0] < now_s:
            del self._used[self._used_until.popleft()[1]]  # stale: its age keeps it out by now
        if self._cause:
            return self._refusal(nonce, EngineDeadError(f"the world has ended: {self._cause}"))
        if self._world is None:
            return Wait(nonce, "the engine is loading")
        if self._next_id >= FRONTENDS_END:
            limit = FRONTENDS_END - 1
            return self._refusal(nonce, _full(f"has given out its {limit} frontend numbers", limit))
        if len(self._frontends) >= self.bounds.frontends_max:
            limit = self.bounds.frontends_max
            return self._refusal(nonce, _full(f"serves {limit} frontends already", limit))
        is_full = len(self._used) >= self.bounds.used_cookies_max
        if is_full or self._num_opening() >= self.bounds.opening_max:
            return Wait(nonce, "many others are attaching")
        return None

    def _num_opening(self) -> int:
        return sum(f.phase is Phase.OPENING for f in self._frontends.values())

    def _refusal(self, nonce: bytes, error: BatonError) -> Refused:
        self.num_refused += 1
        return Refused(nonce, error.to_data())

    def _on_lane(self, event: LaneOpen | LaneRefused) -> list[Effect]:
        frontend = self._frontends.get(event.frontend_id)
        if frontend is None or frontend.phase is not Phase.OPENING:
            self.num_unknown += 1
            return []
        request = frontend.request
        if isinstance(event, LaneRefused):
            del self._frontends[event.frontend_id]
            refusal = self._refusal(request.nonce, from_data(event.error))
            return [Answer(frontend.route, frontend.key_id, refusal)]
        assert self._world is not None
        frontend.phase = Phase.OPEN
        self.num_attached += 1
        attached = Attached(
            nonce=request.nonce,
            frontend_id=event.frontend_id,
            requests_endpoint=event.requests_endpoint,
            results_endpoint=event.results_endpoint,
            leader=self._world.leader,
            leader_host=self._world.leader_host,
            heartbeat_s=self.bounds.heartbeat_s,
            silence_s=frontend.silence_s,
        )
        return [
            Watch(event.frontend_id, request.process),
            Answer(frontend.route, frontend.key_id, attached),
        ]

    # --- leaving --------------------------------------------------------------

    def _on_gone(self, event: Left | LaneGone | ProcessGone) -> list[Effect]:
        frontend = self._frontends.pop(event.frontend_id, None)
        if frontend is None:
            self.num_unknown += 1
            return []
        effects: list[Effect] = []
        if frontend.phase is Phase.OPEN:
            effects.append(Unwatch(event.frontend_id))
        who = frontend.request
        match event:
            case Left():
                effects.append(CloseLane(event.frontend_id, "its frontend has left"))
                effects.append(Tell(event.route, event.frontend_id, frontend.key, GoodbyeAck()))
            case ProcessGone():
                why = f"its frontend {shorten(who.name)!r} (process {who.process.pid}) has ended"
                effects.append(CloseLane(event.frontend_id, why))
            case LaneGone():
                pass
            case _:
                assert_never(event)
        return effects

    def _on_world_down(self, cause: str) -> list[Effect]:
        if self._cause:
            return []
        self._cause = shorten(cause, WORDS_LENGTH_MAX) or "nobody said why"
        effects: list[Effect] = []
        for frontend in self._frontends.values():
            if frontend.phase is Phase.OPEN:
                effects.append(Unwatch(frontend.frontend_id))
                effects.append(
                    Tell(
                        frontend.route,
                        frontend.frontend_id,
                        frontend.key,
                        WorldEnded(self._cause),
                    )
                )
            else:
                error = EngineDeadError(f"the world has ended: {self._cause}")
                refusal = self._refusal(frontend.request.nonce, error)
                effects.append(Answer(frontend.route, frontend.key_id, refusal))
        self._frontends.clear()
        return effects


def _full(what: str, limit: int) -> OverloadedError:
    return OverloadedError(f"the world {what}", field="frontends", limit=limit)
