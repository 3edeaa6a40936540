"""The forms under soak: each opened with bounds of about a second, and its processes by role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import psutil

from executor.attach.point import AttachPoint
from executor.executor import GenerationExecutor
from executor.health import HealthBounds
from executor.post.limits import PostLimits
from tests.support.attach_world import attached
from tests.support.executor_forms import NAMES, RARE_NAMES, RAY, Opened, form_of
from tests.support.executor_scripted import CharTokenizer, config, posted
from tests.support.executor_spread import Spread

LEASE_S = 2.0
ENGINE = config(step_ms=1.0, lease_ms=int(LEASE_S * 1000), num_blocks=8192)
HEALTH = HealthBounds(silence_s=1.5, stall_s=2.0, give_up_s=4.0)
HEARTBEAT_S = 0.3
LIMITS: dict[str, Any] = {
    "health": HEALTH,
    "heartbeat_s": HEARTBEAT_S,
    "deadline_grace_s": 1.0,
    "stop_live_s_max": 4.0,
    "post": PostLimits(answer_s_max=1.0, restarts_max=50),
}
TIMES_ALLOWED = 5
DEATH_S = 1.0
"""What every form promises on one host, from a death to the last answer."""
SOAKED = (*NAMES, *RARE_NAMES)
RAYS = ("RankAgent", "ray_driver")
HELPERS = {
    "mpi2": ("mpi_launcher", "mpiexec", "hydra_pmi_proxy"),
    **dict.fromkeys(RAY, RAYS),
}
"""Words in the commands of what stands between a launcher and its ranks."""


class Sharing(NamedTuple):
    how: Literal["rpc", "attach"]
    num_fronts: int
    """Of this process."""
    num_workers: int = 0
    """Postprocess workers of each."""


SHARED = {
    "rpc": Sharing("rpc", 1),
    "rpc-post2": Sharing("rpc", 1, 2),
    "attach3": Sharing("attach", 3),
}
"""Forms of several frontends on one world, which a process of its own owns."""


@dataclass(frozen=True)
class Stage:
    """One executor that is open, and who may be hurt."""

    form: str
    executor: GenerationExecutor
    point: AttachPoint | None
    """Where another frontend may attach, if it can."""
    owner_pid: Callable[[], int] = int
    """Of the process that owns the world; 0 where that is this one."""

    @property
    def fronts(self) -> tuple[GenerationExecutor, ...]:
        executor: Any = self.executor
        return executor.fronts if isinstance(executor, Spread) else (executor,)

    def pids(self, role: str) -> tuple[int, ...]:
        executor: Any = self.executor
        match role:
            case "rank":
                return tuple(executor.worker_pids)
            case "post":
                return tuple(executor.post_pids)
            case "helper":
                return tuple(_named(HELPERS[self.form]))
            case "owner":
                return (self.owner_pid(),)
        raise AssertionError(role)


def roles_of(form: str) -> tuple[str, ...]:
    """Each is as likely as any other to be hurt."""
    roles = ["loop", "owner"]
    roles += ["rank"] if form != "single" else []
    roles += ["post"] if "post" in form else []
    roles += ["helper"] if form in HELPERS else []
    roles += ["front"] if form in SHARED else []
    return tuple(roles)


def opened(form: str, cluster: Callable[[], str]) -> Opened:
    """A form whose world this process owns."""
    return form_of(form, cluster).open(ENGINE, tokenizer=CharTokenizer(), **LIMITS)


@contextlib.asynccontextmanager
async def staged(form: str, cluster: Callable[[], str]) -> AsyncIterator[Stage]:
    async with opened(form, cluster) as executor:
        yield Stage(form, executor, None)


@contextlib.asynccontextmanager
async def attached_stage(
    form: str, point: AttachPoint, owner_pid: Callable[[], int]
) -> AsyncIterator[Stage]:
    sharing = SHARED[form]
    engine, tokenizer = posted(ENGINE, sharing.num_workers), CharTokenizer()
    async with attached(
        point, sharing.num_fronts, engine=engine, tokenizer=tokenizer, **LIMITS
    ) as fronts:
        spread: Any = Spread(fronts)
        yield Stage(form, spread, point, owner_pid)


def _named(words: tuple[str, ...]) -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if any(word in command for word in words):
                found.append(process.pid)
    return found
