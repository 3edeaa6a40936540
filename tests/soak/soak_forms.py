"""The forms under soak: each opened with bounds of about a second, and its processes by role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import psutil

from executor.attach.point import AttachPoint
from executor.executor import GenerationExecutor
from executor.health import HealthBounds
from executor.post.limits import PostLimits
from tests.support.attach_world import attached, shared_world
from tests.support.executor_forms import NAMES, form_of
from tests.support.executor_scripted import CharTokenizer, config
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
HELPERS = {
    "mpi2": ("mpi_launcher", "mpiexec", "hydra_pmi_proxy"),
    "ray": ("RankAgent", "ray_driver"),
}
"""Words in the commands of what stands between a launcher and its ranks."""
SHARED = {"rpc": ("rpc", 1), "attach3": ("attach", 3)}
"""Forms of several frontends on one world: how they attach, and how many are ours."""


@dataclass(frozen=True)
class Stage:
    """One executor that is open, and who may be hurt."""

    form: str
    executor: GenerationExecutor
    point: AttachPoint | None
    """Where another frontend may attach, if it can."""

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
        raise AssertionError(role)


def roles_of(form: str) -> tuple[str, ...]:
    roles = ["loop"]
    roles += ["rank", "rank"] if form != "single" else []
    roles += ["post", "post"] if form == "ipc-post2" else []
    roles += ["helper"] if form in HELPERS else []
    roles += ["front"] if form in SHARED else []
    return tuple(roles)


@contextlib.asynccontextmanager
async def staged(form: str, cluster: Callable[[], str]) -> AsyncIterator[Stage]:
    assert form in NAMES, form
    tokenizer = CharTokenizer()
    async with contextlib.AsyncExitStack() as stack:
        if form not in SHARED:
            opened = form_of(form, cluster).open(ENGINE, tokenizer=tokenizer, **LIMITS)
            yield Stage(form, await stack.enter_async_context(opened), None)
            return
        how, num = SHARED[form]
        world = await stack.enter_async_context(shared_world(ENGINE, form=how, **LIMITS))
        fronts = await stack.enter_async_context(
            attached(world.point, num, engine=ENGINE, tokenizer=tokenizer, **LIMITS)
        )
        spread: Any = Spread(fronts)
        yield Stage(form, spread, world.point)


def _named(words: tuple[str, ...]) -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if any(word in command for word in words):
                found.append(process.pid)
    return found
