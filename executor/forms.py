"""Which form the executor takes, and why: one choice, told in one log line.

A form is a link (executor/link.py). Imports are late, so that a form costs only
who uses it, and one whose library is missing is told by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from executor.config import EngineConfig
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from protos.errors import ConfigError

if TYPE_CHECKING:
    from executor.attach.point import AttachPoint


class MakeLink(Protocol):
    def __call__(
        self, config: EngineConfig, *, name: str, limits: ExecutorLimits, user: LinkUser
    ) -> Link: ...


@dataclass(frozen=True)
class Choice:
    what: str
    why: str
    make_link: MakeLink | None
    point: AttachPoint | None = None
    """Where to attach first; that makes the link then."""

    async def link_maker(
        self,
        config: EngineConfig,
        *,
        name: str,
        limits: ExecutorLimits,
        progress: Callable[[str], None],
    ) -> Callable[[LinkUser], Link]:
        """Raises ConfigError or EngineDeadError where a world elsewhere does not let us in."""
        make_link = self.make_link
        if make_link is not None:
            return lambda user: make_link(config, name=name, limits=limits, user=user)
        from executor.attach.attached_link import reach

        assert self.point is not None
        return await reach(self.point, config, name=name, limits=limits, progress=progress)


def choose_form(config: EngineConfig, point: AttachPoint | None = None) -> Choice:
    """`point`: where a world elsewhere is attached to. Raises ConfigError for a form that cannot
    be had here."""
    executor = config.executor
    if point is not None:
        return _attached(point)
    form = executor.form
    why = f"executor.form is {form}"
    if form == "auto":
        form = "rpc" if executor.rpc_address else "ipc"
        why = "executor.rpc_address is given" if executor.rpc_address else "nothing else is asked"
    match form:
        case "ipc":
            from executor.owned_link import OwnedLink

            return Choice("IPC proxy, a worker world of its own on this host", why, OwnedLink)
        case "single":
            from executor.single import ThreadLink

            return Choice("single process, the engine in a thread of this one", why, ThreadLink)
        case "ray":
            from executor.ray_link import RayLink

            return Choice("Ray, a world of its own under actors of a cluster", why, RayLink)
        case "rpc":
            raise ConfigError(
                "executor.form is rpc, which needs the cluster's secret: a server has it, "
                "`create` takes it as `point` (executor.attach.point.rpc_point makes one)",
                field="executor.form",
            )
        case _:
            raise ConfigError(
                f"executor.form is {form}, which is not there yet", field="executor.form"
            )


def _attached(point: AttachPoint) -> Choice:
    if point.form == "attach":
        return Choice("attaches to our launcher's world", "it started us so", None, point)
    what = f"RPC proxy, which attaches to the world at {point.where}"
    return Choice(what, "executor.rpc_address is given", None, point)
