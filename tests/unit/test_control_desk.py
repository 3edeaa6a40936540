"""Rank 0's desk for control calls: what is looked at first, and what a call that fails ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import pytest

from executor.control_desk import ControlDesk, Members
from executor.engine.control import Method, RankFacts
from executor.engine.control_seam import EngineControl
from executor.engine.member import MemberControl
from executor.messages import Call, CallReply
from executor.world.collective import MemberCall, RankValue, answer
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


class TwoMembers:
    """Answer at once, as members do: rank 1 well, rank 2 as its control is."""

    has_room = True

    def __init__(self) -> None:
        self.controls = [MemberControl(RankFacts(rank, "scripted", "none")) for rank in (1, 2)]

    def call_all(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Future[tuple[Any, ...]]:
        call = MemberCall(1, method, dict(arguments))
        answers = [answer(1, dict(control.methods()), call) for control in self.controls]
        future: Future[tuple[Any, ...]] = Future()
        future.set_result(
            tuple(RankValue(i + 1, told.value, told.error) for i, told in enumerate(answers))
        )
        return future


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


@pytest.mark.parametrize("method", ["start_profile", "load_lora"])
def test_what_a_member_refused_no_rank_keeps(method: str, tmp_path: Path) -> None:
    """Bug: where a member could not record, the leader and the others went on recording, and the
    next profile was refused as the second one."""
    leader, members = MemberControl(RankFacts(0, "scripted", "none")), TwoMembers()
    said: SimpleQueue[CallReply] = SimpleQueue()
    woken: SimpleQueue[bool] = SimpleQueue()
    desk = ControlDesk(
        leader, lambda _, reply: said.put(reply), members, wake=lambda: woken.put(True)
    )
    arguments = {"path": str(tmp_path / "t.json")}
    if method == "load_lora":
        arguments["name"] = "a"
        members.controls[1].load_lora("a", "/a")
    else:
        members.controls[1].start_profile(str(tmp_path / "other"))
    call = Call(1, method, msgspec.msgpack.encode(arguments))
    desk.begin(0, call)
    assert woken.get(timeout=5.0)
    assert said.empty()  # whoever hears of it may ask again at once
    desk.turn()
    error = said.get(timeout=5.0).error
    assert error is not None
    assert f"{method} failed on rank 2" in error.message
    members.controls[1] = MemberControl(RankFacts(2, "scripted", "none"))  # and so it is mended
    desk.begin(0, call)
    assert said.get(timeout=5.0).error is None
    desk.close()


def test_another_profile_than_the_one_that_failed_goes_on(tmp_path: Path) -> None:
    control = MemberControl(RankFacts(1, "scripted", "none"))
    control.start_profile(str(tmp_path / "mine"))
    control.drop_profile(str(tmp_path / "other"))
    assert control.stop_profile().path == str(tmp_path / "mine.rank1")
