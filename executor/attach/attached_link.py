"""The link of a frontend to a world that another process owns: forms "rpc" and "attach".

    attached -> lane connected, READY heard -> in use -> dead (for good), or left

How it learns of a death, and how soon:

- on the world's host (always so for "attach"): rank 0's pidfd tells at once; the broker's word
  of the cause is waited for a moment. Open requests end within 1 s.
- over hosts ("rpc"): the broker tells at once where the owner lives. Where it does not, or the
  network is cut, open requests end by `health.silence_ms` and the engine counts as dead by
  `health.give_up_ms`.
- a frame that was lost with a broken connection, and a lane that rank 0 has closed (we were
  silent or did not read), end this frontend's engine at once; the world and others go on.

What is dead stays dead: a fresh `create` attaches anew, under another number. `stop` says
goodbye, so that rank 0 ends what is left of ours now and not by our silence; it never stops
the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import zmq

from executor.attach.caller import Caller, Place
from executor.attach.point import AttachPoint
from executor.attach.process_watch import ProcessWatch
from executor.channel import ProxyChannel
from executor.config import EngineConfig
from executor.limits import BEATS_PER_SILENCE, ExecutorLimits
from executor.link import Link, LinkUser
from executor.messages import Beat, ToProxy
from protos.errors import ConfigError, describe

logger = logging.getLogger(__name__)
CONNECT_POLL_S = 0.02
LAST_WORDS_S = 0.4
"""The owner waits for rank 0's last words first, and then tells us."""


async def reach(
    point: AttachPoint,
    config: EngineConfig,
    *,
    name: str,
    limits: ExecutorLimits,
    progress: Callable[[str], None],
) -> Callable[[LinkUser], AttachedLink]:
    """Attach; what comes back makes the link. Raises ConfigError or EngineDeadError."""
    try:
        caller = Caller(point)
    except (OSError, zmq.ZMQError) as error:
        raise _no_sockets(point, error) from None
    try:
        place = await caller.attach(name, limits, progress, config.executor.postprocess_workers)
        _check_beats(place, config, point)
    except BaseException:
        caller.close()
        raise

    def make_link(user: LinkUser) -> AttachedLink:
        try:
            return AttachedLink(caller, place, name=name, limits=limits, user=user)
        except BaseException as error:
            caller.say_goodbye()
            caller.close()
            if isinstance(error, OSError | zmq.ZMQError):
                raise _no_sockets(point, error) from None
            raise

    return make_link


def _no_sockets(point: AttachPoint, error: Exception) -> ConfigError:
    return ConfigError(
        f"this process cannot open its sockets to {point.where}: {error}; it may need a higher "
        "limit of open files (ulimit -n)",
        field="nofile",
    )


def _check_beats(place: Place, config: EngineConfig, point: AttachPoint) -> None:
    """A world that beats slower than we expect would count as silent all the time."""
    least_ms = int(place.attached.heartbeat_s * 1000 * BEATS_PER_SILENCE)
    if config.health.silence_ms < least_ms:
        raise ConfigError(
            f"engine.health.silence_ms is {config.health.silence_ms}; the world at {point.where} "
            f"beats every {place.attached.heartbeat_s:g} s, so it must be at least {least_ms}",
            field="engine.health.silence_ms",
            value=config.health.silence_ms,
            limit=f"at least {least_ms}",
        )


class AttachedLink(Link):
    shares_engine = True
    must_beat = True
    fate = "was given up by this frontend"

    def __init__(
        self,
        caller: Caller,
        place: Place,
        *,
        name: str,
        limits: ExecutorLimits,
        user: LinkUser,
    ) -> None:
        last_words_s = max(limits.last_words_s, LAST_WORDS_S)
        super().__init__(name, dataclasses.replace(limits, last_words_s=last_words_s), user)
        self.form = caller.point.form
        self.frontend_id = place.spec.frontend_id
        self._where = caller.point.where
        self._caller = caller
        self._leader = place.attached.leader
        self._has_left = False
        self.channel = ProxyChannel(
            place.spec,
            limits,
            on_messages=self._on_messages,
            on_crash=self._on_crash,
            curve_server_key=place.curve_server_key,
        )
        self.requests = self.channel.requests
        caller.on_world_ended = self._on_world_ended
        self._watch = ProcessWatch(self._leader, self.loop, self._on_exit)

    # --- start ----------------------------------------------------------------

    async def start(self, progress: Callable[[str], None]) -> None:
        """Our first word makes rank 0 look, and greet us."""
        self.requests.put(Beat())
        ends_at_s = self.loop.time() + self.limits.hello_s_max
        while not self.requests.flush() and self.loop.time() < ends_at_s:
            if self.dead.done():
                break
            await asyncio.sleep(CONNECT_POLL_S)
        await self.within(self._ready, self.limits.hello_s_max, "greet us")
        logger.info("%s: attached to %s as frontend %d", self.name, self._where, self.frontend_id)
        progress(f"attached to the engine at {self._where}")

    # --- what is known --------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        if not self._watch.is_here or self._watch.has_exited():
            return ()
        return (self._leader.pid,)

    def counters(self) -> dict[str, int]:
        return {
            "bad_frames": self.channel.opener.num_bad + self._caller.num_bad_frames,
            "lost_frames": self.channel.opener.num_lost,
            "wakes": self.channel.num_wakes,
        }

    def hold(self, is_held: bool) -> bool:
        """Too long, and rank 0 closes our lane as that of one who does not read."""
        self.channel.hold(is_held)
        return True

    def has_exited(self) -> bool:
        return self._watch.has_exited()

    # --- death ----------------------------------------------------------------

    def kill(self) -> None:
        """The engine is not ours to end."""

    def _on_exit(self) -> None:
        if not self.is_stopping:
            self.suspect()

    def _on_world_ended(self) -> None:
        """The owner has waited for the last words already."""
        if not self.is_stopping:
            self.suspect()
            self._handle()

    def _on_messages(self, messages: list[ToProxy]) -> None:
        """Nothing that came behind a gap is handed on: a stream would go on without its middle."""
        num_lost = self.channel.opener.num_lost
        if not num_lost:
            self.user.on_messages(messages)
        elif not self.dead.done():
            self.declare_dead(
                f"the connection to {self._where} broke, and {num_lost} frames are lost"
            )

    def _on_crash(self, error: Exception) -> None:
        self.declare_dead(f"reading its results failed: {describe(error)}")

    def describe_death(self) -> list[str]:
        if self._caller.world_ended:
            return [self._caller.world_ended]
        if self._watch.has_exited():
            return [f"the engine's worker (process {self._leader.pid}) has ended"]
        return []

    def declare_dead(self, cause: str) -> None:
        super().declare_dead(cause)
        if not self.is_stopping:
            self._leave_at_once()

    def _leave_at_once(self) -> None:
        """The world may live on: it should not work for us any more."""
        if not self._has_left and not self._caller.world_ended:
            self._has_left = True
            self._caller.say_goodbye()

    # --- end ------------------------------------------------------------------

    async def stop(self, *, is_well: bool) -> tuple[str, ...]:
        del is_well  # there is nothing to end but our lane
        self.is_stopping = True
        if self._death_timer is not None:
            self._death_timer.cancel()
        if not self._has_left and not self._watch.has_exited():
            self._has_left = True
            if not await self._caller.leave():
                logger.warning("%s: %s did not read our goodbye", self.name, self._where)
        self._free()
        return ()

    def cut(self) -> None:
        self.is_stopping = True
        self._leave_at_once()
        self._free()

    def _free(self) -> None:
        self._watch.close()
        self.declare_dead("it was shut down")
        self.channel.close()
        self._caller.close()
