"""Launcher `ray`: every rank under an actor of a Ray cluster, on whatever node Ray chooses.

The cluster is joined, or started on this host and ended with the world. Between the owner and
the actors stands the Ray driver, a child process (ray_driver.py says why).

How deaths are seen: a rank's on this host by its pidfd, on another by the agent beside it,
within a second both; an actor's through its rank, which dies with it; the driver's at once,
and what it has started dies with it; a node's by the silence of its ranks (health.silence_ms
fails what is open, health.give_up_ms ends the world), or by Ray where that is sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from common.scratch import ScratchFolder
from executor.child import WorkerChild
from executor.config import EngineConfig
from executor.limits import ExecutorLimits
from executor.world.launch import LAUNCHER, Exit, Launcher
from executor.world.orders import Orders, pack_orders
from executor.world.ray_messages import (
    DriverEvent,
    DriverOrders,
    Joined,
    Placed,
    RankEnded,
    Refused,
    pack_driver_orders,
)
from protos.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)
JOIN_S_MAX = 30.0
"""For a cluster to answer, or to start."""
PLACE_S_MAX = 20.0
"""For the actors to find places and start their ranks."""
ANSWER_S_MAX = 5.0
"""From the driver's own bound to its word."""
PACKET_BYTES_MAX = 1 << 16
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""For the driver and what it starts: Ray neither reports home nor warns of what we do not use."""
TOKEN_BYTES = 32
PARENT_BYTES_MAX = 16
SHORT_PARENT = Path("/tmp")  # noqa: S108 - the folder in it is private, and its name is not guessed


class RayLauncher(Launcher):
    name = "ray"
    spans_hosts = True
    has_process = True

    def __init__(self, config: EngineConfig, *, name: str, limits: ExecutorLimits) -> None:
        self._address = config.executor.ray_address
        self._num_cpus = max(1, config.num_threads)
        """Ray also sets OMP_NUM_THREADS to it, where the user has not."""
        self._num_gpus = 1 if config.device.startswith("cuda") else 0
        self._name = name
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._child: WorkerChild | None = None
        self._folder: ScratchFolder | None = None
        self._socket: socket.socket | None = None
        self._exits: list[Exit] = []
        self._is_over = False
        self._events: asyncio.Queue[DriverEvent] = asyncio.Queue()
        self._on_exit: Callable[[], None] = lambda: None

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "executor.form ray needs Ray, which is not installed: it comes with the extra "
                "[ray]: pip install -e '.[ray]' in Baton's folder",
                field="executor.form",
                value="ray",
                limit="an installed ray",
            )
        self._on_exit = on_exit
        self._start_driver(orders)
        where = f"the Ray cluster at {self._address}" if self._address else "a Ray cluster"
        try:
            await self._expect(Joined, JOIN_S_MAX, f"{where} did not come up")
            await self._expect(Placed, PLACE_S_MAX + ANSWER_S_MAX, f"{where} placed no actors")
        except BaseException:
            await self._end_driver()
            raise

    def _start_driver(self, orders: Sequence[Orders]) -> None:
        environment = self._environment()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._take)
        driver_orders = DriverOrders(
            address=self._address,
            folder="" if self._folder is None else str(self._folder.path),
            num_cpus_per_rank=self._num_cpus,
            num_gpus_per_rank=self._num_gpus,
            place_s_max=PLACE_S_MAX,
            events_fd=theirs.fileno(),
            ranks=tuple(pack_orders(order) for order in orders),
        )
        with theirs:
            self._child = WorkerChild(
                pack_driver_orders(driver_orders),
                name=self._name,
                limits=self._limits,
                on_exit=self._driver_ended,
                module="executor.world.ray_driver",
                kind="Ray driver",
                environment=environment,
                leads_group=True,
                pass_fds=(theirs.fileno(),),
            )

    def _environment(self) -> dict[str, str]:
        """A cluster of ours is for us alone: it has a token of its own, in its own folder. For
        another one, Ray's settings are the user's, as they stand in our environment."""
        if self._address:
            return QUIET
        self._folder = ScratchFolder("baton-ray-", _short_parent())
        token = self._folder.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(TOKEN_BYTES))
        return {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}

    async def _expect(self, kind: type[DriverEvent], timeout_s: float, otherwise: str) -> None:
        """Raises ConfigError with the driver's refusal, or where it says nothing in time."""
        assert self._child is not None
        getting = asyncio.ensure_future(self._events.get())
        ended = asyncio.ensure_future(self._child.exited.wait())
        try:
            await asyncio.wait(
                (getting, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            event = getting.result() if getting.done() else None
        finally:
            getting.cancel()
            ended.cancel()
        if isinstance(event, Refused):
            raise ConfigError(event.words, field=event.field)
        if isinstance(event, kind):
            return
        if ended.done() and not ended.cancelled():
            lines = "\n  ".join(self._child.log_lines)
            raise EngineDeadError(f"{self._child.describe_exit()}; its last log lines:\n  {lines}")
        raise ConfigError(
            f"{otherwise} within {timeout_s:g} s",
            field="executor.ray_address",
            value=self._address,
            limit=timeout_s,
        )

    async def _end_driver(self) -> None:
        """Nobody waits for the end of a world that was never launched."""
        assert self._child is not None
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.exited.wait(), self._limits.stop_dead_s_max)

    # --- what became of them ----------------------------------------------------

    def exits(self) -> tuple[Exit, ...]:
        self._read()
        self._look_at_driver()
        return tuple(self._exits)

    def _look_at_driver(self) -> None:
        """Its whole group goes with it: of a cluster of ours, Ray leaves some behind."""
        if self._is_over or self._child is None or not self._child.has_exited():
            return
        self._kill_group()
        self._is_over = True
        self._exits.append(Exit(LAUNCHER, self._child.describe_exit()))

    def _driver_ended(self) -> None:
        self._look_at_driver()
        self._on_exit()

    def _take(self) -> None:
        num_exits = len(self._exits)
        self._read()
        if len(self._exits) > num_exits:
            self._on_exit()

    def _read(self) -> None:
        while self._socket is not None:
            try:
                packet = self._socket.recv(PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if not packet:
                self._close_socket()
                return
            event = msgspec.msgpack.decode(packet, type=DriverEvent)
            if isinstance(event, RankEnded):
                self._exits.append(Exit(event.rank, event.words))
            else:
                self._events.put_nowait(event)

    def kill(self) -> None:
        """The driver and a cluster of ours; in another one the actors end with their job."""
        if not self._is_over:
            self._kill_group()

    def _kill_group(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    @property
    def log_lines(self) -> tuple[str, ...]:
        return () if self._child is None else self._child.log_lines

    def close(self) -> None:
        self._close_socket()
        if self._child is not None:
            self._child.close()
        if self._folder is not None:
            self._folder.close()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None


def _short_parent() -> Path:
    """Ray's sockets lie deep in its folder, and their paths must not be long."""
    parent = Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent)) <= PARENT_BYTES_MAX else SHORT_PARENT
