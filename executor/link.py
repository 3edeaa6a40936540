"""How a proxy reaches its worker world, and how it learns of its fate.

The proxy is the same for every form of the executor; a form is a link:

- it opens a lane: `requests` is the ordered way to rank 0, and what comes back
  is handed to the user on the event loop, in order, a batch at a time;
- it knows whether the world lives. Detection only makes it suspect: nothing is
  accepted any more, and for a moment its last words are still read. Then the
  first cause is declared, once, and stays.

Life: constructed on the event loop, `start`ed (raises where the world does not
come up), in use, dead or not, `stop`ped. Everything but construction of the
world's processes is bounded, and `stop` leaks rather than hangs.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from executor.engine.seam import EngineIdentity
from executor.limits import ExecutorLimits
from executor.messages import ToProxy
from executor.request_queue import RequestQueue
from protos.errors import BatonError, ConfigError, EngineDeadError, ErrorData, from_data

logger = logging.getLogger(__name__)
T = TypeVar("T")


class LinkUser(Protocol):
    """Who stands on the link: called on the event loop."""

    def on_messages(self, messages: list[ToProxy]) -> None: ...

    def on_dead(self, error: EngineDeadError) -> None:
        """Once, with the first cause."""


class Link(ABC):
    """See the module's docstring. Subclasses call `suspect` and `declare_dead`."""

    form: str
    """The executor's form, as configured and told."""
    shares_engine: bool = False
    """Whether other frontends use the same engine."""
    is_local: bool = False
    """Whether requests stay Python objects of this process: what cannot be serialised may pass."""
    fate: str = "was killed"
    """What becomes of a world that is given up, in words."""
    requests: RequestQueue
    frontend_id: int

    def __init__(self, name: str, limits: ExecutorLimits, user: LinkUser) -> None:
        self.name = name
        self.limits = limits
        self.user = user
        self.loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[EngineDeadError] = self.loop.create_future()
        self.is_stopping = False
        self._ready: asyncio.Future[EngineIdentity] = self.loop.create_future()
        self._last_words: ErrorData | None = None
        self._given_up = ""
        self._death_timer: asyncio.TimerHandle | None = None

    # --- what a form does its own way -----------------------------------------

    @abstractmethod
    async def start(self, progress: Callable[[str], None]) -> None:
        """Until `identity` is known. Raises ConfigError or EngineDeadError; `stop` is next then."""

    @abstractmethod
    async def stop(self, *, is_well: bool) -> tuple[str, ...]:
        """End what is ours, bounded; what could not be freed, in words.

        A world that is well gets `stop_live_s_max` to end by itself, any other
        `stop_dead_s_max`.
        """

    @abstractmethod
    def cut(self) -> None:
        """Once the event loop itself ends, also in the midst of `stop`: what is ours is killed
        and freed, without waiting for any of it."""

    @abstractmethod
    def kill(self) -> None:
        """End the world at once where it is ours; harmless otherwise."""

    @abstractmethod
    def has_exited(self) -> bool:
        """Looks now, ahead of the event loop's turn, where that can be seen."""

    @abstractmethod
    def describe_death(self) -> Sequence[str]:
        """What this form saw of the death, most telling first, beside the worker's own words."""

    @property
    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """Of the world's processes that live on this host, rank 0 first."""

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The last log lines of the world, where we see them."""
        return ()

    @property
    def trouble(self) -> str:
        """What is wrong with ranks other than 0, whose own heartbeat comes by the lane; empty
        while nothing is."""
        return ""

    def counters(self) -> dict[str, int]:
        return {}

    def hold(self, is_held: bool) -> bool:
        """Read no results for a while: a postprocess worker is behind. False where this form
        cannot; what it never stopped goes on."""
        return not is_held

    must_beat: bool = False
    """Whether the worker closes our lane where it hears nothing from us."""

    # --- for the forms ----------------------------------------------------------

    async def within(self, future: asyncio.Future[T], timeout_s: float, what: str) -> T:
        """The future's value. Raises what ended the world meanwhile, or where time runs out."""
        await asyncio.wait(
            (future, self.dead), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if future.done():
            return future.result()
        if self.dead.done():
            raise self.start_error()
        raise EngineDeadError(f"the engine's worker did not {what} within {timeout_s:g} s")

    def start_error(self) -> BatonError:
        """Asked once dead: the user's own mistake keeps its type."""
        words = self._last_words
        if words is not None and words.kind == ConfigError.__name__:
            return from_data(words)
        return self.dead.result()

    # --- the same for all -----------------------------------------------------

    @property
    def identity(self) -> EngineIdentity:
        return self._ready.result()

    @property
    def is_loaded(self) -> bool:
        return self._ready.done()

    @property
    def is_suspect(self) -> bool:
        """Its death was seen, and the cause is not declared yet."""
        return self._death_timer is not None and not self.dead.done()

    def on_ready(self, identity: EngineIdentity) -> None:
        if not self._ready.done():
            self._ready.set_result(identity)

    def on_died(self, error: ErrorData) -> None:
        """The worker's own last words."""
        self._last_words = self._last_words or error
        self.suspect()

    def on_lane_closed(self, why: str) -> None:
        self.declare_dead(f"its worker closed our lane: {why}")

    def suspect(self) -> None:
        """Detection: the cause is declared in a moment."""
        if self._death_timer is None and not self.dead.done():
            self._death_timer = self.loop.call_later(self.limits.last_words_s, self._handle)

    def _handle(self) -> None:
        words = self._last_words
        said = f"{words.kind}: {words.message}" if words is not None else ""
        self.declare_dead(
            "; ".join(part for part in (self._given_up, said, *self.describe_death()) if part)
        )

    def give_up(self, why: str) -> None:
        """The world does not come back: it counts as dead even where it cannot be ended."""
        if not self.is_stopping and not self._given_up:
            self._given_up = why
            self.kill()
            self.suspect()

    def declare_dead(self, cause: str) -> None:
        """The first cause wins and stays."""
        if self.dead.done():
            return
        error = EngineDeadError(f"the engine of {self.name} is dead: {cause}")
        if not self.is_stopping:
            logger.error("%s", error.message)
        self.dead.set_result(error)
        self.user.on_dead(error)
