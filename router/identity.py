"""Who this router is, and in which state: starting, ready, unavailable, draining."""

from __future__ import annotations

import secrets
import time
from importlib.metadata import PackageNotFoundError, version

from protos.messages import ServerInfo
from router.fleet import Fleet


class RouterIdentity:
    """One life of one router. `is_draining` is set once, at shutdown."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = secrets.randbits(64)
        self.address = ""
        self.is_draining = False
        self._version = _version()
        self._started_s = time.monotonic()

    def info(self, fleet: Fleet, servers: tuple[ServerInfo, ...]) -> ServerInfo:
        detail = fleet.why_not_usable()
        state = "ready"
        if detail:
            state = "unavailable" if fleet.was_usable else "starting"
        if self.is_draining:
            state, detail = "draining", "shutting down"
        return ServerInfo(
            name=self.name,
            role="router",
            incarnation=self.incarnation,
            version=self._version,
            model="" if fleet.model is None else fleet.model.limits.model,
            uptime_s=time.monotonic() - self._started_s,
            state=state,
            detail=detail,
            address=self.address,
            servers=servers,
        )


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"
