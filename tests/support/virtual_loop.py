"""An event loop whose time is a variable: timers fire when the test says that time has passed."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TURNS_MAX = 1000


class _NeverWaits(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing here waits. What goes wrong in a callback is raised by `settle`."""

    def __init__(self) -> None:
        super().__init__(_NeverWaits())
        self.now_s = 0.0
        self._errors: list[BaseException] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self.now_s

    def settle(self) -> None:
        """Until nothing is left to do at this instant."""
        me: Any = self
        for _ in range(TURNS_MAX):
            self.call_soon(self.stop)
            self.run_forever()
            if self._errors:
                raise self._errors.pop(0)
            if not me._ready and not (me._scheduled and me._scheduled[0]._when <= self.now_s):
                return
        raise AssertionError("the loop never comes to rest")

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """Call it as a callback of this loop would be called."""

        async def called() -> T:
            return function(*args)

        return self.finish(called())

    def finish(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """For what ends without time passing."""
        task = self.create_task(coroutine)
        self.settle()
        assert task.done(), "it waits for something"
        return task.result()

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.settle()

    def end(self) -> None:
        """Drop what still waits."""
        self._errors.clear()
        self.set_exception_handler(lambda *_: None)
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.call_soon(self.stop)
        self.run_forever()
        self.close()

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.append(context.get("exception") or AssertionError(context["message"]))
