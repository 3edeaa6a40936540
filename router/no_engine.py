"""The calls of Control that concern an engine: a router has none, and says so by words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

from protos.errors import UnsupportedError


class Answering(Protocol):
    """What the servicer gives these calls."""

    async def _answer(self, context: Any, answer: Callable[[], Awaitable[Any]]) -> Any: ...


def _refusing(method: str) -> Any:
    async def call(self: Answering, _request: Any, context: Any) -> None:
        async def answer() -> NoReturn:
            raise UnsupportedError(
                f"{method}: a router has no engine: name one context or generation server",
                field="method",
                value=method,
                limit="a context or generation server's address",
            )

        await self._answer(context, answer)

    call.__name__ = method
    return call


class NoEngineCalls:
    """Mixed into the servicer."""

    Sleep = _refusing("Sleep")
    WakeUp = _refusing("WakeUp")
    StartProfile = _refusing("StartProfile")
    StopProfile = _refusing("StopProfile")
    LoadLora = _refusing("LoadLora")
    UnloadLora = _refusing("UnloadLora")
    ListLoras = _refusing("ListLoras")
    SubscribeKvEvents = _refusing("SubscribeKvEvents")
    SubscribeStats = _refusing("SubscribeStats")
