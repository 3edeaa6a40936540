"""Who is hurt when, drawn from a seed, and what each deed allows and demands.

A round has a few harmless-to-the-world deeds, and maybe one at its end that the world must not
survive. `pause` ends within the round; `stop` never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from protos.errors import BatonError, EngineDeadError
from tests.soak.soak_forms import HEALTH, HEARTBEAT_S, SHARED, Stage, roles_of
from tests.soak.soak_load import Load
from tests.support.executor_scripted import CRASH, EXIT, collect, request

DEADLY = {
    "rank": ("kill", "term", "stop"),
    "helper": ("kill", "term"),
    "loop": ("crash", "exit"),
    "owner": ("kill", "term"),
}
"""What may end the world. It lives without its owner's word, but not without its process."""
KINDS = {
    "rank": ("kill", "term", "stop", "pause"),
    "post": ("kill", "term", "stop", "pause"),
    "helper": ("kill", "term", "pause"),
    "front": ("kill", "term", "stop", "pause"),
    "loop": ("crash", "exit"),
    "owner": ("kill", "term", "stop", "pause"),
}
OWN_KINDS = ("kill", "kill early", "term")
"""Of an owner that is the server itself; early: while it starts."""
PAUSES_S = (0.1, 0.5, 2.0, 2.5)
TAKEN_S_MAX = 5.0
AFTERMATH_S = 1.0
"""After a pause: what waited is still said to have been silent, until the heart is heard."""


@dataclass
class Deed:
    role: str
    kind: str
    after_s: float
    pause_s: float
    pick: int
    pid: int = 0
    done_at_s: float = 0.0
    ended_at_s: float = float("inf")
    was_missed: bool = False
    """What was to end the loop did not come to it: a silence before it took it along."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.kind}"

    @property
    def may_end_the_world(self) -> bool:
        return self.kind in DEADLY.get(self.role, ())

    @property
    def must_end_the_world(self) -> bool:
        """A launcher's helper need not be missed; a rank's SIGTERM is a request to leave."""
        return self.may_end_the_world and self.role != "helper" and not self.was_missed

    @property
    def may_silence(self) -> bool:
        return self.kind in ("pause", "stop") and self.role in ("rank", "helper")


def draw(form: str, rng: Random) -> list[Deed]:
    """At most one that may end the world, and it comes last. An owner that is the server itself
    takes everybody with it: it is hurt alone."""
    num_deeds = rng.choice((0, 1, 1, 2, 2, 3))
    roles = roles_of(form)
    if num_deeds and form not in SHARED:
        role = rng.choice(roles)
        if role == "owner":
            return [_draw_one(role, OWN_KINDS, rng)]
        roles = tuple(role for role in roles if role != "owner")
    drawn = [rng.choice(roles) for _ in range(num_deeds)]
    kinds = KINDS if form != "single" else {"loop": ("crash",)}
    deeds = sorted((_draw_one(role, kinds[role], rng) for role in drawn), key=lambda d: d.after_s)
    ends = [deed for deed in deeds if deed.may_end_the_world][:1]
    return [*(deed for deed in deeds if not deed.may_end_the_world), *ends]


def _draw_one(role: str, kinds: tuple[str, ...], rng: Random) -> Deed:
    return Deed(
        role=role,
        kind=rng.choice(kinds),
        after_s=rng.uniform(0.4, 2.0),
        pause_s=rng.choice(PAUSES_S),
        pick=rng.randrange(100),
    )


class Nemesis:
    def __init__(self, stage: Stage, load: Load, front_pid: Callable[[], int], num: int) -> None:
        self._stage = stage
        self._load = load
        self._front_pid = front_pid
        self._num = num
        self.done: list[Deed] = []

    async def act(self, deeds: list[Deed]) -> None:
        began_s = time.monotonic()
        for deed in deeds:
            await asyncio.sleep(max(0.0, began_s + deed.after_s - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                await self._do(deed)

    async def _do(self, deed: Deed) -> None:
        if deed.role != "loop":
            pids = (self._front_pid(),) if deed.role == "front" else self._stage.pids(deed.role)
            if not pids or not all(pids):
                return
            deed.pid = pids[deed.pick % len(pids)]
        deed.done_at_s = time.monotonic()
        self.done.append(deed)
        history = self._load.history
        if deed.role == "post":
            history.post_hurt_at_s = min(history.post_hurt_at_s, deed.done_at_s)
        if deed.may_end_the_world:
            history.deaths.setdefault(0, deed.done_at_s)
        if deed.may_silence:
            length_s = deed.pause_s + AFTERMATH_S if deed.kind == "pause" else float("inf")
            history.silences.append((0, deed.done_at_s, deed.done_at_s + length_s))
        if deed.role == "loop":
            await self._end_loop(deed)
        else:
            await _signal(deed)

    async def _end_loop(self, deed: Deed) -> None:
        """A worker that was just paused may refuse for a moment."""
        asked = request(f"end-{self._num}", (1, CRASH if deed.kind == "crash" else EXIT))
        ends_at_s = time.monotonic() + TAKEN_S_MAX
        result = None
        while result is None:
            assert time.monotonic() < ends_at_s, "still refused, long after a pause"
            with contextlib.suppress(BatonError):
                result = self._stage.executor.submit(asked)
            await asyncio.sleep(0.0 if result else 0.02)
        deed.done_at_s = time.monotonic()
        async with asyncio.timeout(TAKEN_S_MAX):
            end = await asyncio.gather(collect(result), return_exceptions=True)
        deed.was_missed = not isinstance(end[0], EngineDeadError)


async def _signal(deed: Deed) -> None:
    numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
    os.kill(deed.pid, numbers.get(deed.kind, signal.SIGSTOP))
    if deed.kind == "pause":
        await asyncio.sleep(deed.pause_s)
        os.kill(deed.pid, signal.SIGCONT)
        deed.ended_at_s = time.monotonic()


def bound_s(deed: Deed) -> float:
    """Within which every answer must be there, as the form states it."""
    return HEALTH.silence_s + HEARTBEAT_S if deed.kind in ("stop", "pause") else 1.0


def death_bound_s(deed: Deed) -> float:
    """Within which the executor must count as dead."""
    return HEALTH.give_up_s + HEARTBEAT_S if deed.kind == "stop" else 1.0
