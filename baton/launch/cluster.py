"""A cluster of processes on this machine: start, watch, stop.

    stopped -> starting -> up -> stopped

`start` brings the servers up first and the router last, since the router's
configuration names their real ports. Whoever dies ends the cluster: `start`
and `watch` raise ServerUnavailableError with the last log lines. `stop` is bounded
and leaves no process behind, whatever went before.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from baton.client import Client
from baton.launch.child import Child, log_tail
from baton.launch.config import DEMO_MODEL, ClusterConfig
from baton.launch.interrupt import Interrupt
from baton.launch.plan import (
    ProcessPlan,
    check_plans,
    listen_addresses,
    plan_router,
    plan_servers,
)
from baton.launch.ports import check_free
from baton.launch.runtime import ClusterState, ProcessState, RuntimeDir
from common.security import load_secret
from protos.errors import ConfigError, ServerUnavailableError

PATIENCE_S = 5.0
"""How long nothing is said about a process that is still loading."""
MEMBERS_POLL_S = 0.05
STOP_ORDER = ("router", "generation", "context")


class Cluster:
    def __init__(
        self,
        config: ClusterConfig,
        progress: Callable[[str], None],
        interrupt: Interrupt | None = None,
    ) -> None:
        self._config = config
        self._progress = progress
        self._interrupt = interrupt
        self._runtime = RuntimeDir(Path(config.runtime_dir))
        self._children: list[Child] = []
        self.secret_file = Path()
        """Known once started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The router's HOST:PORT, once up."""
        return next(child.address for child in self._children if child.role == "router")

    @property
    def _is_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.number is not None

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children)

    # --- up -----------------------------------------------------------------

    def start(self) -> None:
        """Returns when every process serves.

        Raises ConfigError before any was started or where one cannot work as it is
        configured, ServerUnavailableError where one died or took too long,
        KeyboardInterrupt where a signal asked to stop.
        """
        config = self._config
        check_plans(config)
        self._runtime.acquire()
        check_free(listen_addresses(config))
        model = self._model()
        self.secret_file = self._runtime.prepare_secret(config.secret_file)
        plans = plan_servers(
            config, model=model, secret_file=self.secret_file, num_cores=os.cpu_count() or 1
        )
        self._bring_up(plans)
        router = plan_router(
            config,
            model=model,
            secret_file=self.secret_file,
            context_servers=self._addresses("context"),
            generation_servers=self._addresses("generation"),
        )
        self._bring_up((router,))
        self._await_members()
        self._runtime.write_state(self._state())

    def _model(self) -> str:
        """A path that holds from any folder. The demo model is made where it is missing."""
        model = self._config.model
        if model == DEMO_MODEL:
            from baton.demo_model import demo_model_folder

            return str(demo_model_folder(progress=self._progress))
        if model and not Path(model).exists():
            limit = "a Hugging Face folder, a GGUF file, or demo"
            raise ConfigError(
                f"model is {model!r}, which does not exist; it must be {limit} "
                "(nothing is downloaded)",
                field="model",
                value=model,
                limit=limit,
            )
        return str(Path(model).absolute()) if model else ""

    def _bring_up(self, plans: Iterable[ProcessPlan]) -> None:
        started_s = time.monotonic()
        fresh = [self._spawn(plan) for plan in plans]
        deadline_s = started_s + self._config.start_timeout_s
        with self._selector() as selector:
            for child in fresh:
                selector.register(child.ready_fd, selectors.EVENT_READ, child)
            self._await_ready(selector, fresh, started_s, deadline_s)

    def _spawn(self, plan: ProcessPlan) -> Child:
        config_file = self._runtime.write_config(plan)
        log_file = self._runtime.log_file(plan.name)
        child = Child(plan, config_file, log_file, scratch=self._runtime.scratch)
        self._children.append(child)
        self._progress(f"{child.name}: starting (pid {child.pid})")
        return child

    def _await_ready(
        self,
        selector: selectors.BaseSelector,
        fresh: list[Child],
        started_s: float,
        deadline_s: float,
    ) -> None:
        told_s = started_s
        while not all(child.is_ready for child in fresh):
            events = selector.select(timeout=PATIENCE_S / 5)
            now_s = time.monotonic()
            self._look_around()
            for key, _ in events:
                self._take_ready(selector, key, now_s - started_s)
            if now_s > deadline_s:
                self._refuse_slow(fresh, now_s - started_s)
            if now_s - told_s > PATIENCE_S:
                told_s = now_s
                self._tell_loading(fresh, now_s - started_s)

    def _take_ready(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, waited_s: float
    ) -> None:
        child = key.data
        if key.fileobj == child.ready_fd and not child.read_ready():
            selector.unregister(child.ready_fd)
            if child.is_ready:
                self._progress(f"{child.name}: ready on {child.address} ({waited_s:.1f} s)")

    def _tell_loading(self, fresh: list[Child], waited_s: float) -> None:
        for child in fresh:
            if not child.is_ready:
                last = "".join(log_tail(child.log_file, 1))
                self._progress(f"{child.name}: still starting ({waited_s:.0f} s) {last}".rstrip())

    def _refuse_slow(self, fresh: list[Child], waited_s: float) -> None:
        for child in fresh:
            if not child.is_ready:
                what = f"was not ready after {waited_s:.0f} s (start_timeout_s)"
                raise ServerUnavailableError(child.story(what))

    def _await_members(self) -> None:
        """The router listens at once; that it can serve with all of them is asked of it.

        Raises ConfigError where the servers cannot pair, such as by unequal block sizes.
        """
        token = load_secret(self.secret_file).control_token()
        deadline_s = time.monotonic() + self._config.start_timeout_s
        with Client(self.address, control_token=token) as client, self._selector() as selector:
            while True:
                info = client.info()
                missing = [server for server in info.servers if server.state != "ready"]
                if not missing:
                    break
                self._look_around()
                if time.monotonic() > deadline_s:
                    raise ServerUnavailableError(
                        f"the router does not reach {missing[0].address}: {missing[0].detail}"
                    )
                selector.select(MEMBERS_POLL_S)
        if info.state != "ready":
            raise ConfigError(f"the servers cannot serve together: {info.detail}")

    def _addresses(self, role: str) -> list[str]:
        return [child.address for child in self._children if child.role == role]

    def _state(self) -> ClusterState:
        return ClusterState(
            router=self.address,
            secret_file=str(self.secret_file),
            pid=os.getpid(),
            processes=tuple(
                ProcessState(name=child.name, role=child.role, address=child.address, pid=child.pid)
                for child in self._children
            ),
        )

    # --- watching -----------------------------------------------------------

    def watch(self) -> None:
        """Returns when a signal asks to stop.

        Raises ServerUnavailableError where a process died.
        """
        with self._selector() as selector:
            while not self._is_interrupted:
                self.check_alive()
                selector.select()

    def check_alive(self) -> None:
        """Raises ServerUnavailableError where a process died, ConfigError where its
        configuration cannot work.
        """
        for child in self._children:
            if child.has_exited:
                refusal = child.refusal()
                if refusal:
                    raise ConfigError(
                        f"{child.name} cannot start: {refusal}; `baton doctor` tells what this "
                        f"machine can do, {child.log_file} the rest"
                    )
                raise ServerUnavailableError(child.story(child.death()))

    def _look_around(self) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt
        self.check_alive()

    def _selector(self) -> selectors.BaseSelector:
        """Wakes at a death and at a signal."""
        selector = selectors.DefaultSelector()
        for child in self._children:
            selector.register(child.pidfd, selectors.EVENT_READ, child)
        if self._interrupt is not None:
            selector.register(self._interrupt.fd, selectors.EVENT_READ)
        return selector

    # --- down ---------------------------------------------------------------

    def stop(self, *, in_order: bool = True) -> None:
        """End every process: by SIGTERM, and after `stop_timeout_s` by SIGKILL. Idempotent.

        In order, a role has ended before the next is asked: the router stops
        taking requests before its servers go.
        """
        stages = [(role,) for role in STOP_ORDER] if in_order else [STOP_ORDER]
        for roles in stages:
            self._stop_roles(roles)
        for child in self._children:
            if not child.end_group():
                self._progress(f"{child.name}: pid {child.pid} does not even die by SIGKILL")
        self._children.clear()
        self._runtime.release()

    def _stop_roles(self, roles: tuple[str, ...]) -> None:
        members = [child for child in self._children if child.role in roles]
        for child in members:
            child.terminate()
        deadline_s = time.monotonic() + self._config.stop_timeout_s
        with selectors.DefaultSelector() as selector:
            for child in members:
                selector.register(child.pidfd, selectors.EVENT_READ, child)
            while not all(child.has_exited for child in members):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                for key, _ in selector.select(left_s):
                    selector.unregister(key.fileobj)
        for child in members:
            if not child.has_exited:
                self._progress(f"{child.name}: did not stop in time, killed")
