"""Rank 0's desk for control calls: what is looked at first, and what a call that fails ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import msgspec
import pytest

from executor.control_desk import ControlDesk, Members
from executor.engine.control import Method
from executor.engine.control_seam import EngineControl
from executor.messages import Call, CallReply
from protos.errors import InternalError


class FullMembers:
    """As many calls wait for them as may."""

    has_room = False

    def call_all(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Future[tuple[Any, ...]]:
        raise AssertionError(f"{method} was sent")


class OneMethod:
    def __init__(self, run: Callable[[], Any]) -> None:
        self._method = Method("sleep", run, is_coordinated=True)

    def methods(self) -> Mapping[str, Method]:
        return {"sleep": self._method}


def desk_of(
    run: Callable[[], Any], members: Members | None = None
) -> tuple[ControlDesk, list[Any]]:
    said: list[CallReply] = []
    control = cast(EngineControl, OneMethod(run))
    return ControlDesk(control, lambda _, reply: said.append(reply), members), said


CALL = Call(1, "sleep", msgspec.msgpack.encode({}))


def test_rank_0_does_nothing_alone() -> None:
    """Bug: with 64 calls under way rank 0 fell asleep, and only then was it found that the members
    could not be told: the caller heard that it failed, and half of the world slept."""
    done: list[str] = []
    desk, said = desk_of(lambda: done.append("slept"), FullMembers())
    desk.begin(0, CALL)
    assert said[0].error.kind == "OverloadedError"
    assert not done


@pytest.mark.parametrize(
    "error", [OSError(36, "File name too long"), ValueError("\udc80"), KeyError()]
)
def test_a_call_that_fails_ends_alone(error: Exception) -> None:
    """Bug: a profile's path that was too long for the system ended the engine, and with it sixty
    streams of three frontends. What cannot be encoded in its words must not either."""

    def fail() -> None:
        raise error

    desk, said = desk_of(fail)
    desk.begin(0, CALL)
    assert said[0].error.kind == "RequestFailedError"
    assert msgspec.msgpack.encode(said[0])


def test_an_engine_that_says_so_itself_ends() -> None:
    def fail() -> None:
        raise InternalError("falling asleep failed half-way")

    desk, said = desk_of(fail)
    with pytest.raises(InternalError):
        desk.begin(0, CALL)
    assert not said


def test_a_call_is_no_step_that_hangs() -> None:
    """Guards `health.stall_ms`: waking up loads the weights, which may take longer than it."""
    seen: list[bool] = []
    desk, _ = desk_of(lambda: seen.append(desk.is_at_work))
    desk.begin(0, CALL)
    assert seen == [True]
    assert not desk.is_at_work
