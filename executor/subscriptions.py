"""Who listens to an engine's statistics and KV events, and what they have not read yet.

An engine builds neither while nobody listens. Each subscription is bounded: a
slow reader loses the oldest, which is counted, and for KV events shows as a gap
in the sequence numbers.

A subscription's life: open (it is asked for, and its items come), then closed by
its reader, or ended by the engine's death, which its reader is told once all
items are read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Generic, TypeVar

from executor.engine.control_seam import IterationStats, KvEvent
from executor.messages import Listen, Observed
from protos.errors import BatonError

ITEMS_MAX = 4096
T = TypeVar("T")


class Subscription(Generic[T]):
    """An async iterator and context manager, for one reader on the event loop."""

    def __init__(self, close: Callable[[Subscription[T]], None], items_max: int) -> None:
        self._close = close
        self._items: deque[T] = deque(maxlen=items_max)
        self._news = asyncio.Event()
        self._error: BatonError | None = None
        self.is_closed = False
        self.num_dropped = 0

    def push(self, items: Iterable[T]) -> None:
        for item in items:
            self.num_dropped += len(self._items) == self._items.maxlen
            self._items.append(item)
        self._news.set()

    def fail(self, error: BatonError) -> None:
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """Safe twice."""
        if not self.is_closed:
            self.is_closed = True
            self._close(self)
            self._news.set()

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self.is_closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()

    async def take(self, timeout_s: float) -> list[T]:
        """All there is; waits up to `timeout_s` for a first item. Raises as the iteration does."""
        try:
            first = [await asyncio.wait_for(anext(self), timeout_s)] if not self._items else []
        except (TimeoutError, StopAsyncIteration):
            return []
        items = [*first, *self._items]
        self._items.clear()
        return items

    def __enter__(self) -> Subscription[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Subscriptions:
    """Both kinds of one executor. `tell` takes the news of who listens to the engine."""

    def __init__(self, tell: Callable[[Listen], None], items_max: int = ITEMS_MAX) -> None:
        self._tell = tell
        self._items_max = items_max
        self._stats: list[Subscription[IterationStats]] = []
        self._kv_events: list[Subscription[KvEvent]] = []
        self._told = Listen(stats=False, kv_events=False)

    def to_stats(self) -> Subscription[IterationStats]:
        return self._open(self._stats)

    def to_kv_events(self) -> Subscription[KvEvent]:
        return self._open(self._kv_events)

    def on_observed(self, observed: Observed) -> None:
        if observed.stats is not None:
            for reader in self._stats:
                reader.push((observed.stats,))
        for listener in self._kv_events:
            listener.push(observed.kv_events)

    def fail_all(self, error: BatonError) -> None:
        for reader in self._stats:
            reader.fail(error)
        for listener in self._kv_events:
            listener.fail(error)
        self._stats.clear()
        self._kv_events.clear()

    def _open(self, subscriptions: list[Subscription[T]]) -> Subscription[T]:
        def close(subscription: Subscription[T]) -> None:
            if subscription in subscriptions:
                subscriptions.remove(subscription)
            self._tell_changes()

        subscription = Subscription(close, self._items_max)
        subscriptions.append(subscription)
        self._tell_changes()
        return subscription

    def _tell_changes(self) -> None:
        wanted = Listen(stats=bool(self._stats), kv_events=bool(self._kv_events))
        if wanted != self._told:
            self._told = wanted
            self._tell(wanted)
