"""The roll of a world: which process each rank is, who has joined rank 0, and who has ended.

A rank is entered by its HELLO. From then on its process is watched here, where it lives on this
host and its launcher does not see it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from executor.world.events import Gone, Helloed
from executor.world.launch import Launcher
from executor.world.messages import RankHello
from executor.world.watch import RankWatch

logger = logging.getLogger(__name__)


class Roll:
    """`on_exit` is called on the event loop; `news` then tells of whom."""

    def __init__(self, num_ranks: int, launcher: Launcher, on_exit: Callable[[], None]) -> None:
        self._num_ranks = num_ranks
        self._launcher = launcher
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._hellos: dict[int, RankHello] = {}
        self._joined: dict[int, None] = {0: None}  # rank 0 has nobody to join
        self._watches: dict[int, RankWatch] = {}
        self._num_exits = 0

    @property
    def leader(self) -> RankHello:
        """Rank 0's; asked only once it was entered."""
        return self._hellos[0]

    @property
    def is_complete(self) -> bool:
        """Everybody is there and connected."""
        return len(self._hellos) == self._num_ranks == len(self._joined)

    @property
    def all_pids(self) -> tuple[int, ...]:
        """Of everybody entered, in order of rank, on whatever host."""
        return tuple(hello.process.pid for _, hello in sorted(self._hellos.items()))

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those who live on this host, rank 0 first."""
        gone = {exit_.rank for exit_ in self._launcher.exits()}
        gone |= {rank for rank, watch in self._watches.items() if watch.has_exited()}
        return tuple(
            hello.process.pid
            for rank, hello in sorted(self._hellos.items())
            if rank not in gone and hello.process.is_here()
        )

    def enter(self, rank: int, hello: RankHello) -> Helloed | None:
        """None where another process has that rank. A repeated HELLO is entered as before."""
        process = hello.process
        if self._hellos.setdefault(rank, hello).process != process:
            logger.error("process %d claims rank %d, which is another one's", process.pid, rank)
            return None
        is_here, launcher = process.is_here(), self._launcher
        if is_here and not launcher.sees_ranks and rank not in self._watches:
            self._watches[rank] = RankWatch(rank, process, self._loop, self._on_exit)
        where = "" if is_here else f" on {process.host.partition('/')[0]}"
        is_seen = launcher.ranks_end and (is_here or launcher.sees_ranks)
        return Helloed(rank, f"rank {rank} (process {process.pid}{where})", is_seen)

    def join(self, rank: int) -> None:
        self._joined[rank] = None

    def has_exited(self) -> bool:
        """Looks now, whether anything of the world has ended."""
        watches = self._watches.values()
        return bool(self._launcher.exits()) or any(watch.has_exited() for watch in watches)

    def news(self) -> list[Gone]:
        """Whoever ended since the last look."""
        exits = self._launcher.exits()
        told = [Gone(exit_.rank, exit_.words) for exit_ in exits[self._num_exits :]]
        self._num_exits = len(exits)
        watches = self._watches.values()
        return told + [Gone(watch.rank, watch.words) for watch in watches if watch.is_news()]

    def kill(self) -> None:
        for watch in self._watches.values():
            watch.kill()
        self._launcher.kill()

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._launcher.close()
