"""The line before the executor: room, order, what passes and what ends, on a double of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton import line as line_module
from baton.batch import Batch
from baton.line import Entry, Line
from executor.engine.seam import EngineFinish
from executor.home import Home
from executor.request import ExecutorRequest
from executor.result import GenerationResult, ResultChunk
from protos.errors import (
    BatonError,
    EngineDeadError,
    InternalError,
    OverloadedError,
    RequestCancelledError,
    RequestFailedError,
    ServerUnavailableError,
    Severity,
)
from protos.messages import FinishReason, Usage
from tests.support.executor_scripted import request

END = EngineFinish(reason=FinishReason.LENGTH, usage=Usage())


class Executor:
    """Takes requests, or says `refusal`; ends one when it is told to."""

    def __init__(self) -> None:
        self.open: dict[str, GenerationResult] = {}
        self.took: list[str] = []
        self.refusal: Exception | None = None

    def submit(self, asked: ExecutorRequest) -> GenerationResult:
        if self.refusal is not None:
            raise self.refusal
        name = asked.external_id
        self.took.append(name)
        self.open[name] = GenerationResult(len(self.took), lambda _: self.fail(name))
        return self.open[name]

    def finish(self, name: str) -> None:
        self.open.pop(name).push(ResultChunk(token_ids=(1,), finish=END))

    def fail(self, name: str) -> None:
        self.open.pop(name).fail(RequestCancelledError("cancelled"))


class Stand:
    def __init__(self, room: int) -> None:
        self.executor = Executor()
        self.line = Line(self.executor.submit, room=room)
        self.home = Home.here()
        self.ended: list[str] = []

    def add(self, name: str) -> GenerationResult:
        entry = Entry(request(name), self.home, owner=None, notify=lambda: self.ended.append(name))
        self.line.add(entry)
        return entry.result

    async def turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.line.check()


async def test_no_more_than_there_is_room_for_and_in_order() -> None:
    stand = Stand(room=2)
    results = [stand.add(name) for name in "abcd"]
    await stand.turn()
    assert stand.executor.took == ["a", "b"]
    stand.executor.finish("b")
    stand.executor.fail("a")
    await stand.turn()
    assert stand.executor.took == ["a", "b", "c", "d"]
    for name in "cd":
        stand.executor.finish(name)
    await stand.turn()
    assert stand.ended == ["b", "a", "c", "d"]
    with pytest.raises(RequestCancelledError):
        await results[0]
    assert [(await result).token_ids for result in results[1:]] == [(1,)] * 3


async def test_an_abort_ends_one_that_waits_and_one_that_runs() -> None:
    stand = Stand(room=1)
    running, waiting, last = (stand.add(name) for name in "abc")
    await stand.turn()
    waiting.abort()
    waiting.abort()
    running.abort()
    await stand.turn()
    assert stand.executor.took == ["a", "c"]
    for result in (running, waiting):
        with pytest.raises(RequestCancelledError):
            await result
    stand.executor.finish("c")
    assert (await last).token_ids == (1,)


@pytest.mark.parametrize(
    "refusal", [OverloadedError("full"), ServerUnavailableError("stands still")]
)
async def test_a_refusal_that_passes_only_makes_them_wait(
    monkeypatch: pytest.MonkeyPatch, refusal: BatonError
) -> None:
    monkeypatch.setattr(line_module, "RETRY_S", 0.001)
    stand = Stand(room=5)
    stand.executor.refusal = refusal
    results = [stand.add(name) for name in "ab"]
    await asyncio.sleep(0.01)
    assert stand.ended == []
    stand.executor.refusal = None
    async with asyncio.timeout(5):
        while stand.executor.took != ["a", "b"]:  # noqa: ASYNC110 - it retries by time
            await asyncio.sleep(0.001)
    assert not any(result.is_ended for result in results)
    stand.line.check()


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (EngineDeadError("gone"), EngineDeadError),
        (OverloadedError("for good", severity=Severity.ENGINE), OverloadedError),
        (RequestFailedError("no"), RequestFailedError),
        (ZeroDivisionError("a defect"), InternalError),
    ],
)
async def test_any_other_refusal_ends_each(refusal: Exception, kind: Any) -> None:
    stand = Stand(room=1)
    stand.executor.refusal = refusal
    results = [stand.add(name) for name in "abc"]
    await stand.turn()
    for result in results:
        with pytest.raises(kind):
            await result
    assert stand.ended == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("error", "is_noted"),
    [
        (RequestFailedError("no"), True),
        (RequestFailedError("no, and the engine with it", severity=Severity.ENGINE), False),
        (ServerUnavailableError("stands still"), True),
        (EngineDeadError("gone"), False),
    ],
)
def test_only_an_error_of_one_prompt_names_the_prompt(error: BatonError, is_noted: bool) -> None:
    """Bug: whose error it was got concluded from its Python type, not from its severity."""

    def refuse(index: int, notify: Callable[[], None]) -> GenerationResult:
        raise error

    batch = Batch(3, return_exceptions=False, is_alive=lambda: True, progress=None)
    with pytest.raises(type(error)) as raised:
        batch.run(refuse)
    notes = getattr(raised.value, "__notes__", [])
    assert notes == (["prompts[0] of 3 prompts"] if is_noted else [])


async def test_after_the_end_nobody_waits() -> None:
    stand = Stand(room=1)
    running, waiting = stand.add("a"), stand.add("b")
    await stand.turn()
    stand.line.close(ServerUnavailableError("over"))
    late = stand.add("c")
    stand.executor.finish("a")
    await stand.turn()
    assert (await running).token_ids == (1,)
    for result in (waiting, late):
        with pytest.raises(ServerUnavailableError, match="over"):
            await result
    assert stand.executor.took == ["a"]
