"""Launcher `spawn`: every rank is a child process of the owner, on this host. Needs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from executor.child import WorkerChild
from executor.limits import ExecutorLimits
from executor.world.launch import Exit, Launcher
from executor.world.orders import Orders, pack_orders


class SpawnLauncher(Launcher):
    name = "spawn"
    sees_ranks = True

    def __init__(self, name: str, limits: ExecutorLimits) -> None:
        self._name = name
        self._limits = limits
        self._children: list[WorkerChild] = []
        self._exits: list[Exit] = []

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        for order in orders:
            is_alone = order.num_ranks == 1
            self._children.append(
                WorkerChild(
                    pack_orders(order),
                    name=self._name if is_alone else f"{self._name} rank {order.rank}",
                    limits=self._limits,
                    on_exit=partial(self._on_exit, on_exit),
                    module="executor.world.rank_main",
                    kind="worker" if is_alone else f"worker of rank {order.rank}",
                )
            )

    def exits(self) -> tuple[Exit, ...]:
        seen = {exit_.rank for exit_ in self._exits}
        for rank, child in enumerate(self._children):
            if rank not in seen and child.has_exited():
                self._exits.append(Exit(rank, child.describe_exit()))
        return tuple(self._exits)

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    @property
    def log_lines(self) -> tuple[str, ...]:
        first = self._exits[0].rank if self._exits else 0
        others = [child for rank, child in enumerate(self._children) if rank != first]
        telling = self._children[first : first + 1]
        return tuple(line for child in (*others, *telling) for line in child.log_lines)

    def close(self) -> None:
        for child in self._children:
            child.close()

    def _on_exit(self, on_exit: Callable[[], None]) -> None:
        self.exits()
        on_exit()
