"""The link of a process that owns its world: form "ipc", and "ray" by another launcher.

The world (executor/world) starts the ranks, sees their death and ends them. This adds the
owner's own lane to rank 0: over ipc in a private folder whose files are forgotten before the
model loads, over tcp where ranks may be on other hosts.

A process of the world that dies on this host ends all that is pending within 1 s; a rank that
stands still, or dies on a host whose launcher cannot tell, by `health`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from executor.channel import ProxyChannel
from executor.config import EngineConfig
from executor.engine.seam import EngineIdentity
from executor.lane import OWNER_ID
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from executor.world.frames import own_address
from executor.world.launch import Launcher, create_launcher
from executor.world.world import World
from protos.errors import EngineDeadError, ErrorData, describe

CONNECT_S_MAX = 1.0
CONNECT_POLL_S = 0.02


class OwnedLink(Link):
    """The world's word of a death is the only one: what the lane says of it comes twice."""

    form = "ipc"
    frontend_id = OWNER_ID

    def __init__(
        self, config: EngineConfig, *, name: str, limits: ExecutorLimits, user: LinkUser
    ) -> None:
        """Raises ConfigError for a launcher that cannot be had here."""
        super().__init__(name, limits, user)
        launcher = self.make_launcher(config)
        self.channel = ProxyChannel.local(
            limits,
            on_messages=user.on_messages,
            on_crash=self._on_crash,
            num_buckets=config.executor.postprocess_workers,
            address=own_address() if launcher.spans_hosts else "",
        )
        self.requests = self.channel.requests
        self.on_other_lane_closed: Callable[[int, str], None] = lambda _id, _why: None
        """Of other frontends' lanes, if there are any."""
        self.world = World(
            config,
            name=name,
            limits=limits,
            launcher=launcher,
            lane=self.channel.spec,
            on_dead=self._on_world_dead,
            on_lane_closed=lambda frontend_id, why: self.on_other_lane_closed(frontend_id, why),
        )

    def make_launcher(self, config: EngineConfig) -> Launcher:
        """A form whose ranks start another way has one of its own."""
        return create_launcher(config.executor.world, name=self.name, limits=self.limits)

    # --- start ----------------------------------------------------------------

    async def start(self, progress: Callable[[str], None]) -> None:
        identity = await self.world.start(progress, self._forget_files)
        super().on_ready(identity)

    async def _forget_files(self) -> None:
        """Before the model loads: a SIGKILL in that long while must leave no file behind.

        The HELLOs came by one socket; the lane's own connection may be a moment later.
        """
        deadline_s = self.loop.time() + CONNECT_S_MAX
        while not self.channel.forget_files() and self.loop.time() < deadline_s:
            if self.dead.done():
                return
            await asyncio.sleep(CONNECT_POLL_S)

    # --- what is known --------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        return self.world.pids

    @property
    def log_lines(self) -> tuple[str, ...]:
        return self.world.log_lines

    @property
    def is_suspect(self) -> bool:
        return self.world.is_suspect

    @property
    def trouble(self) -> str:
        return self.world.trouble

    def counters(self) -> dict[str, int]:
        return {
            "bad_frames": self.channel.opener.num_bad,
            "bad_status_frames": self.world.num_bad_frames,
            "wakes": self.channel.num_wakes,
        }

    def hold(self, is_held: bool) -> bool:
        self.channel.hold(is_held)
        return True

    def has_exited(self) -> bool:
        return self.world.has_exited()

    # --- what comes by the lane -------------------------------------------------

    def on_ready(self, identity: EngineIdentity) -> None:
        """Rank 0's greeting: other ranks may still load, so the world's word counts."""
        del identity
        self.channel.forget_files()

    def on_died(self, error: ErrorData) -> None:
        """The world hears it too, and acks it."""

    def _on_crash(self, error: Exception) -> None:
        self.declare_dead(f"reading its results failed: {describe(error)}")

    # --- death ----------------------------------------------------------------

    def give_up(self, why: str) -> None:
        if not self.is_stopping:
            self.world.give_up(why)

    def kill(self) -> None:
        self.world.kill()

    def describe_death(self) -> Sequence[str]:
        return ()

    def _on_world_dead(self, error: EngineDeadError) -> None:
        if not self.dead.done():
            self.dead.set_result(error)
            self.user.on_dead(error)

    # --- end ------------------------------------------------------------------

    async def stop(self, *, is_well: bool) -> tuple[str, ...]:
        self.is_stopping = True
        leaks = await self.world.stop(is_well=is_well)
        self.channel.close()
        return leaks

    def cut(self) -> None:
        self.is_stopping = True
        self.world.cut()
        self.channel.close()
