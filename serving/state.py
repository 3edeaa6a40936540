"""What the parts of one server share: who it is and how far it has come.

    starting -> ready <-> stalled, asleep
    starting, ready, stalled, asleep -> draining
    any -> dead

Requests are taken in `ready` only; every other state has its refusal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from common.security import ClusterSecret
from common.text.tokenizer import Tokenizer
from executor.executor import GenerationExecutor
from protos.errors import BatonError, EngineDeadError, ServerUnavailableError
from protos.messages import ServerInfo

Phase = Literal["starting", "ready", "stalled", "asleep", "draining", "dead"]
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    "starting": ("ready", "draining", "dead"),
    "ready": ("ready", "stalled", "asleep", "draining", "dead"),
    "stalled": ("ready", "stalled", "asleep", "draining", "dead"),
    "asleep": ("ready", "stalled", "asleep", "draining", "dead"),
    "draining": ("dead",),
    "dead": (),
}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a ready server serves with. `tokenizer` is None where the model has no text."""

    executor: GenerationExecutor
    tokenizer: Tokenizer | None


class ServerState:
    """Owned by the run loop; the servicers read it. Lives on the event loop."""

    def __init__(self, *, name: str, role: str, secret: ClusterSecret) -> None:
        self.name = name
        self.role = role
        self.secret = secret
        self.address = ""
        self.phase: Phase = "starting"
        self.detail = "the engine is starting"
        self._serving: Serving | None = None
        self._started_s = time.monotonic()

    def set_ready(self, serving: Serving) -> None:
        self._serving = serving
        self.move("ready", "")

    def move(self, phase: Phase, detail: str) -> None:
        assert phase in _NEXT[self.phase], f"a server does not go from {self.phase} to {phase}"
        self.phase = phase
        self.detail = detail

    def follow_engine(self) -> None:
        """Between ready, stalled and asleep, as the engine is now."""
        if self._serving is None or self.phase not in ("ready", "stalled", "asleep"):
            return
        executor = self._serving.executor
        try:
            executor.check_health()
        except BatonError as error:
            self.move("stalled", error.message.partition("\n")[0])
        else:
            if executor.is_asleep:
                self.move("asleep", "its weights and its KV pool are released until WakeUp")
            else:
                self.move("ready", "")

    def serving(self) -> Serving:
        """What new requests are served with. Raises ServerUnavailableError unless ready."""
        if self.phase != "ready" or self._serving is None:
            raise self.refusal()
        return self._serving

    def running(self) -> Serving:
        """What questions about requests are answered with, until the engine is gone."""
        if self._serving is None or self.phase == "dead":
            raise self.refusal()
        return self._serving

    def refusal(self) -> ServerUnavailableError:
        """Why a server in this phase takes no request."""
        kind = EngineDeadError if self.phase == "dead" else ServerUnavailableError
        why = "shutting down" if self.phase == "draining" else self.phase
        detail = f": {self.detail}" if self.detail else ""
        return kind(f"{self.role} server {self.name!r} is {why}{detail}")

    def info(self) -> ServerInfo:
        identity = self._serving.executor.identity if self._serving is not None else None
        return ServerInfo(
            name=self.name,
            role=self.role,
            incarnation=identity.incarnation if identity else 0,
            version=package_version(),
            model=identity.model_info.limits.model if identity else "",
            layout=identity.layout if identity else None,
            transport=identity.transport if identity else "",
            rank_addresses=identity.rank_addresses if identity else (),
            uptime_s=time.monotonic() - self._started_s,
            state=self.phase,
            address=self.address,
            detail=self.detail,
        )


def package_version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0+source"
