"""Every form of the executor and every launcher of its world, each opened by its name.

A contract suite takes a form by name and knows nothing else of it. `death_bound_s` is what the
form promises on one host: from the death of one of its world's processes to the end of every
request that is pending. The single-process form has no process to lose.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from executor.config import EngineConfig, ExecutorConfig, WorldConfig
from executor.executor import GenerationExecutor
from tests.support.attach_world import attach3, rpc
from tests.support.executor_scripted import posted, running

Opened = AbstractAsyncContextManager[GenerationExecutor]


@dataclass(frozen=True, kw_only=True)
class Form:
    open: Callable[..., Opened]
    """(engine, tokenizer=None, **limits)."""
    death_bound_s: float | None = 1.0
    told: tuple[str, ...] = ()
    """The log lines that say which form and which launcher, and why; each a pattern."""


@contextlib.contextmanager
def told_lines() -> Iterator[list[str]]:
    """Those lines of this process, as they come."""
    lines: list[str] = []

    class Taker(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if line.startswith(("executor of ", "world of ")) and ", because " in line:
                lines.append(line)

    logger, taker = logging.getLogger("executor"), Taker()
    before = logger.level
    logger.addHandler(taker)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(taker)


BY_IPC = (
    "executor of test: IPC proxy, a worker world of its own on this host, "
    "because executor.form is ipc"
)
ALONE = r"world of {name}: 1 rank\(s\) by launcher spawn, because one rank is asked for"
TOLD_SINGLE = (
    "executor of test: single process, the engine in a thread of this one, "
    "because executor.form is single",
)
OWNS = (
    "executor of owner: IPC proxy, a worker world of its own on this host, "
    "because nothing else is asked"
)
TOLD_RPC = (
    OWNS,
    ALONE.format(name="owner"),
    r"executor of front: RPC proxy, which attaches to the world at 127\.0\.0\.1:\d+, "
    "because executor.rpc_address is given",
)
TOLD_ATTACHED = (
    OWNS,
    ALONE.format(name="owner"),
    *["executor of front: attaches to our launcher's world, because it started us so"] * 3,
)
TOLD_RAY = (
    "executor of test: Ray, a world of its own under actors of a cluster, "
    "because executor.form is ray",
    r"world of test: 1 rank\(s\) by launcher ray, because executor.form is ray",
)


def two_ranks(launcher: str) -> tuple[str, ...]:
    why = f"executor.world.launcher is {launcher}"
    return BY_IPC, rf"world of test: 2 rank\(s\) by launcher {launcher}, because {why}"


def own(**executor: Any) -> Callable[..., Opened]:
    """A form that `create` picks by the configuration."""

    def opened(engine: EngineConfig, *, tokenizer: Any = None, **limits: Any) -> Opened:
        config = msgspec.structs.replace(engine, executor=ExecutorConfig(**executor))
        return running(config, tokenizer=tokenizer, **limits)

    return opened


def ranks(launcher: Any, num_ranks: int) -> WorldConfig:
    return WorldConfig(launcher=launcher, num_ranks=num_ranks)


def with_workers(opener: Callable[..., Opened], num_workers: int) -> Callable[..., Opened]:
    """The same, its text made by postprocess workers."""

    def opened(engine: EngineConfig, **more: Any) -> Opened:
        return opener(posted(engine, num_workers), **more)

    return opened


def on_ray(address: str, num_workers: int) -> Form:
    """`num_workers` postprocess workers."""
    opened = own(form="ray", ray_address=address, postprocess_workers=num_workers)
    return Form(open=opened, told=TOLD_RAY)


FORMS = {
    "single": Form(open=own(form="single"), death_bound_s=None, told=TOLD_SINGLE),
    "ipc": Form(open=own(form="ipc"), told=(BY_IPC, ALONE.format(name="test"))),
    "ipc-post2": Form(
        open=own(form="ipc", postprocess_workers=2), told=(BY_IPC, ALONE.format(name="test"))
    ),
    "spawn2": Form(open=own(form="ipc", world=ranks("spawn", 2)), told=two_ranks("spawn")),
    "rpc": Form(open=rpc, told=TOLD_RPC),
    "attach3": Form(open=attach3, told=TOLD_ATTACHED),
    "mpi2": Form(open=own(form="ipc", world=ranks("mpi", 2)), told=two_ranks("mpi")),
}
RAY = {"ray": 0, "ray-post2": 2}
"""Forms that need a cluster, and their postprocess workers."""
NAMES = (*FORMS, "ray")
WITH_WORKERS = {"rpc-post2": Form(open=with_workers(rpc, 2))}
RARE_NAMES = ("rpc-post2", "ray-post2")
"""The gate runs a part of the contract on these; the soak has them too."""
NOT_RUN = {
    (
        "single",
        "test_a_killed_process_ends_all_that_is_pending",
    ): "the single-process form has no process but the test's own",
    (
        "single",
        "test_an_exit_without_a_word_ends_all_that_is_pending",
    ): "the scripted engine's exit would end the test's own process",
}
"""(form, test): why that form leaves this test out."""


def form_of(name: str, cluster: Callable[[], str]) -> Form:
    """`cluster` gives the address of a Ray cluster, started when it is first asked for."""
    if name in RAY:
        return on_ray(cluster(), RAY[name])
    return {**FORMS, **WITH_WORKERS}[name]
