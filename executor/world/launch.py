"""The Launcher seam: who brings the ranks of a world to life, and which one is taken.

A launcher only starts processes and says what became of them. Everything else (who said what,
what a death means, in which order all ends) is the world's.

Contract (tests/contract runs it for every implementation):

- `launch` returns once every rank is on its way; each then runs `rank.run_rank` with its own
  orders. It raises ConfigError where that cannot be done here. Orders hold the world's key:
  they travel by a pipe, an inherited descriptor or MPI, never by argv or the environment.
- From `launch` on, the end of anything that was started shows in `exits`, as soon as this
  process can see it, and `on_exit` is called then, on the event loop.
- `kill` ends what was started, at once, and is harmless at any time. Ranks whose process this
  host sees are also killed by the world itself, by the pid of their HELLO.
- `close` frees what is left of descriptors and files, never waits, and is safe twice.

A launcher whose ranks may be on other hosts sets `spans_hosts`: the status and leader sockets
are then on tcp. Where `sees_ranks` is false, the world watches ranks of this host by their
HELLO's pid, and those of other hosts by their heartbeat.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from executor.config import WorldConfig
from executor.limits import ExecutorLimits
from executor.world.events import LAUNCHER
from executor.world.orders import Orders
from executor.world.outer import ENTRY, control_descriptor, outer_size
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


class Exit(NamedTuple):
    """`rank` is LAUNCHER for the launcher's own process."""

    rank: int
    words: str


class Launcher(ABC):
    """See the module's docstring."""

    name: str
    spans_hosts: bool = False
    sees_ranks: bool = False
    """Whether `exits` tells of every rank."""
    has_process: bool = False
    """Whether a process of its own stands between, whose end is the world's (LAUNCHER)."""
    ranks_end: bool = True
    """Whether a rank's process ends with the world; else its DONE is all there is to wait for."""

    @abstractmethod
    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None: ...

    @abstractmethod
    def exits(self) -> tuple[Exit, ...]:
        """Looks now; all that ended so far, in the order in which it was seen."""

    @abstractmethod
    def kill(self) -> None: ...

    @property
    @abstractmethod
    def log_lines(self) -> tuple[str, ...]:
        """The last lines of what was started, the first that ended last."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    launcher: str
    why: str


def choose_launcher(
    config: WorldConfig, *, is_entry: bool, num_outer: int, has_mpi: bool
) -> Choice:
    """Pure. Raises ConfigError for a launcher that cannot be had here.

    `is_entry`: our entry runs this command beside rank 0 of an outer job of `num_outer` ranks.
    """
    num_ranks, asked = config.num_ranks, config.launcher
    why = f"executor.world.launcher is {asked}"
    if asked == "external" or (asked == "auto" and num_outer > 1):
        if not is_entry:
            raise _refusal("external", f"a command that mpirun or srun runs as `{ENTRY} COMMAND`")
        if num_ranks != num_outer:
            raise ConfigError(
                f"world.num_ranks is {num_ranks}, but the outer MPI job has {num_outer} ranks",
                field="world.num_ranks",
                value=num_ranks,
                limit=num_outer,
            )
        return Choice("external", f"an outer job of {num_outer} ranks is there already")
    if asked == "mpi" and not has_mpi:
        raise _refusal("mpi", "mpi4py and an MPI library: the extra [mpi]")
    if asked != "auto":
        return Choice(asked, why)
    if num_ranks == 1:
        return Choice("spawn", "one rank is asked for")
    if has_mpi:
        return Choice("mpi", "several ranks are asked for and mpi4py is installed")
    return Choice("spawn", "mpi4py is not installed")


def _refusal(value: str, needs: str) -> ConfigError:
    return ConfigError(
        f"world.launcher {value} needs {needs}", field="world.launcher", value=value, limit=needs
    )


def create_launcher(config: WorldConfig, *, name: str, limits: ExecutorLimits) -> Launcher:
    """Says in one log line which one, and why. Raises ConfigError."""
    descriptor = control_descriptor()
    choice = choose_launcher(
        config,
        is_entry=descriptor is not None,
        num_outer=outer_size() or 0,
        has_mpi=importlib.util.find_spec("mpi4py") is not None,
    )
    logger.info(
        "world of %s: %d rank(s) by launcher %s, because %s",
        name,
        config.num_ranks,
        choice.launcher,
        choice.why,
    )
    match choice.launcher:
        case "mpi":
            from executor.world.mpi import MpiLauncher

            return MpiLauncher(name, limits)
        case "external":
            from executor.world.external import ExternalLauncher

            assert descriptor is not None
            return ExternalLauncher(descriptor)
        case _:
            from executor.world.spawn import SpawnLauncher

            return SpawnLauncher(name, limits)


__all__ = ["LAUNCHER", "Choice", "Exit", "Launcher", "choose_launcher", "create_launcher"]
