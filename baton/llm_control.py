"""What an `LLM` can do with its engine beside asking it: sleep, profiles, LoRA, statistics.

Each call waits for the engine, on any thread but the LLM's own; from a
coroutine, use `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from protos.errors import ServerUnavailableError, WrongThreadError

if TYPE_CHECKING:
    from baton.engine_thread import EngineThread
    from executor.engine.control_seam import IterationStats, KvEvent, KvSnapshot, LoraInfo
    from executor.executor import GenerationExecutor, TraceFile
    from executor.home import Home
    from executor.subscriptions import Subscription

T = TypeVar("T")


class EngineControls:
    """Mixed into `LLM`."""

    _engine: EngineThread
    _executor: GenerationExecutor
    _home: Home

    def collective_rpc(self, method: str, **arguments: Any) -> tuple[Any, ...]:
        """Call a method of the engine's control on every rank: one value each, plain data.

        Raises InvalidRequestError for what cannot be called, by name.
        """
        return self._wait(lambda: self._executor.collective_rpc(method, **arguments))

    def sleep(self) -> None:
        """Give the KV pool's memory and the weights back. Raises NotNowError, naming who
        holds on, while requests are open."""
        self._wait(self._executor.sleep)

    def wake_up(self) -> None:
        """Load the weights again; the same prompts then give the same tokens."""
        self._wait(self._executor.wake_up)

    def start_profile(self, path: str, max_s: float = 60.0) -> None:
        """Record the engine's steps for a trace file at this absolute path, for `max_s` at most
        (900): then it is written, whether or not anybody stops it."""
        self._wait(lambda: self._executor.start_profile(path, max_s))

    def stop_profile(self) -> tuple[TraceFile, ...]:
        """Returns once the files are written, one a rank; also of a profile that its time has
        ended. Raises NotNowError where there is none."""
        return self._wait(self._executor.stop_profile)

    def load_lora(self, name: str, path: str) -> None:
        """Raises UnsupportedError where the engine has no LoRA."""
        self._wait(lambda: self._executor.load_lora(name, path))

    def unload_lora(self, name: str) -> None:
        self._wait(lambda: self._executor.unload_lora(name))

    def list_loras(self) -> tuple[LoraInfo, ...]:
        return self._wait(self._executor.list_loras)

    def kv_snapshot(self) -> KvSnapshot:
        """The hashes of the blocks that can be reused now."""
        return self._wait(self._executor.kv_snapshot)

    def listen_stats(self) -> Listener[IterationStats]:
        """One item a step, from the start of its `with` on."""
        return Listener(self._wait, self._executor.subscribe_stats)

    def listen_kv_events(self) -> Listener[KvEvent]:
        """What becomes reusable and what does not any more, from the start of its `with` on."""
        return Listener(self._wait, self._executor.subscribe_kv_events)

    def _wait(self, ask: Callable[[], Awaitable[T]]) -> T:
        if self._home.is_waiting_for_us():
            raise WrongThreadError("this thread runs the engine or its results; ask elsewhere")
        try:
            return self._engine.run(ask).result()
        except (concurrent.futures.CancelledError, asyncio.CancelledError):
            raise ServerUnavailableError("this LLM was shut down meanwhile") from None


class Listener(Generic[T]):
    """A subscription for synchronous readers: `with llm.listen_stats() as steps: steps.take()`.

    Iterating waits for each item, until the `with` block or the engine ends. Items go to
    whoever asks first, so have one reader. Bounded: of a reader that does not come the oldest
    are dropped (`num_dropped`).
    """

    def __init__(
        self,
        wait: Callable[[Callable[[], Awaitable[Any]]], Any],
        subscribe: Callable[[], Subscription[T]],
    ) -> None:
        self._wait = wait
        self._subscribe = subscribe
        self._subscription: Subscription[T] | None = None

    def __enter__(self) -> Self:
        async def subscribe() -> Subscription[T]:
            return self._subscribe()

        self._subscription = self._wait(subscribe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        subscription = self._subscription

        async def close() -> None:
            if subscription is not None:
                subscription.close()

        try:
            self._wait(close)
        except ServerUnavailableError:
            return  # the engine's end has closed it

    @property
    def num_dropped(self) -> int:
        return 0 if self._subscription is None else self._subscription.num_dropped

    def take(self, timeout_s: float = 0.0) -> list[T]:
        """What has come since the last call; waits up to `timeout_s` for a first item.

        Raises EngineDeadError once all is read that came before the engine's death.
        """
        subscription = self._subscription
        assert subscription is not None, "use it in a with statement"

        async def take() -> list[T]:
            return await subscription.take(timeout_s)

        items: list[T] = self._wait(take)
        return items

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Raises EngineDeadError as `take` does, ServerUnavailableError where the LLM is shut
        down; the iteration ends where the `with` block has."""
        subscription = self._subscription
        assert subscription is not None, "use it in a with statement"

        async def next_one() -> tuple[T, ...]:
            async for item in subscription:
                return (item,)
            return ()

        items: tuple[T, ...] = self._wait(next_one)
        if not items:
            raise StopIteration
        return items[0]
