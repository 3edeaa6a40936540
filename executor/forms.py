"""Which form the executor takes, and why: one choice, told in one log line.

A form is a link (executor/link.py). Imports are late, so that a form costs only
who uses it, and one whose library is missing is told by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from executor.config import EngineConfig
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from protos.errors import ConfigError


class MakeLink(Protocol):
    def __call__(
        self, config: EngineConfig, *, name: str, limits: ExecutorLimits, user: LinkUser
    ) -> Link: ...


@dataclass(frozen=True)
class Choice:
    what: str
    why: str
    make_link: MakeLink


def choose_form(config: EngineConfig) -> Choice:
    """Raises ConfigError for a form that cannot be had here."""
    executor = config.executor
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
        case _:
            raise ConfigError(
                f"executor.form is {form}, which is not there yet", field="executor.form"
            )
