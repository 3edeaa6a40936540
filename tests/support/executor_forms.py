"""Every form of the executor and every launcher of its world, each opened by its name.

A contract suite takes a form by name and knows nothing else of it. `death_bound_s` is what the
form promises on one host: from the death of one of its world's processes to the end of every
request that is pending. The single-process form has no process to lose.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return Form(open=opened)


FORMS = {
    "single": Form(open=own(form="single"), death_bound_s=None),
    "ipc": Form(open=own(form="ipc")),
    "ipc-post2": Form(open=own(form="ipc", postprocess_workers=2)),
    "spawn2": Form(open=own(form="ipc", world=ranks("spawn", 2))),
    "rpc": Form(open=rpc),
    "attach3": Form(open=attach3),
    "mpi2": Form(open=own(form="ipc", world=ranks("mpi", 2))),
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
