"""The order in which a proxy and its link end, part by part, on virtual time.

Intake closed and everything open told and aborted, the sentinel, the world's ranks, its sockets and
monitors, the lane's dispatcher, queue and session; then the proxy's timer and text workers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from executor.messages import Heartbeat
from executor.proxy import Proxy
from executor.world.events import Heard
from executor.world.messages import RankDone
from protos.errors import EngineDeadError, ServerUnavailableError
from tests.support.executor_scripted import request
from tests.support.link_rigs import Rig, opened

OWNED = "ipc: a member, its launcher tells"
ATTACHED = "attach: its pid"


class Tape:
    """What was called, in order."""

    def __init__(self) -> None:
        self.deeds: list[str] = []

    def on(self, thing: Any, name: str, deed: str | Callable[..., str]) -> None:
        """From now on, each call of it is told, and then done."""
        call = getattr(thing, name)

        def told(*args: Any, **more: Any) -> Any:
            word = deed if isinstance(deed, str) else deed(*args)
            if word:
                self.deeds.append(word)
            return call(*args, **more)

        setattr(thing, name, told)


class RecordedPost:
    """Postprocess workers, of whom only the end is of interest."""

    num_buckets, pids = 1, ()

    def __init__(self, deeds: list[str]) -> None:
        self._deeds = deeds

    async def stop(self) -> None:
        self._deeds.append("text workers")


def taped(rig: Rig) -> Tape:
    """`rig`'s parts, from the proxy's own down to the lane's."""
    tape, proxy, link = Tape(), rig.proxy, rig.link
    proxy._post = RecordedPost(tape.deeds)
    tape.on(proxy._requests, "fail_all", "requests told")
    tape.on(proxy._calls, "fail_all", "calls told")
    tape.on(proxy._subscriptions, "fail_all", "subscriptions told")
    tape.on(rig.sender, "send", lambda frame: "abort" if b"Cancel" in bytes(frame) else "")
    tape.on(link, "stop", "link")
    tape.on(link.channel._dispatcher, "stop", "dispatcher")
    tape.on(rig.sender, "close", "queue")
    tape.on(link.channel, "_remove_files", "files")
    return tape


def owned_tape(rig: Rig) -> Tape:
    tape, world = taped(rig), rig.link.world
    words = {"StopRank": "sentinel", "Leave": "leave"}
    tape.on(world._status, "send", lambda _, message: words.get(type(message).__name__, ""))
    tape.on(world._status, "close", "status socket")
    tape.on(world._roll, "close", "monitors")
    tape.on(world._roll, "kill", "kill")
    return tape


TOLD = ["requests told", "calls told", "subscriptions told"]
INTAKE = ["requests told", "abort", "abort", "calls told", "subscriptions told"]
LANE = ["dispatcher", "queue", "files"]


def test_a_living_world_is_asked_first_and_what_stands_on_it_ends_before_what_it_stands_on() -> (
    None
):
    with opened(OWNED) as rig:
        tape = owned_tape(rig)
        results = [rig.loop.do(rig.proxy.submit, request(f"r{i}")) for i in range(2)]
        ending = rig.loop.create_task(rig.proxy.shutdown())
        rig.loop.settle()
        assert tape.deeds == [*INTAKE, "link", "sentinel"]
        for result in results:  # all are told before anything is waited for
            assert type(result.error) is ServerUnavailableError
        with pytest.raises(ServerUnavailableError, match="shutting down"):
            rig.loop.do(rig.proxy.submit, request("late"))
        timer = rig.proxy._tick_timer
        assert not timer.cancelled()  # the requests' deadlines outlive a long stop
        for rank in (0, 1):
            rig.loop.do(rig.link.world._on_message, rank, RankDone())
        assert tape.deeds[7:] == ["leave", "leave"]
        for rank in (0, 1):
            assert not ending.done()
            rig.loop.do(rig.link.world._launcher.end, rank)
        rig.loop.settle()
        assert ending.done()
        assert tape.deeds[9:] == ["status socket", "monitors", *TOLD, *LANE, "text workers"]
        assert rig.proxy._tick_timer.cancelled()
        with pytest.raises(EngineDeadError, match="it was shut down"):
            rig.loop.do(rig.proxy.check_health)


def test_a_dead_world_hears_no_abort_and_no_sentinel() -> None:
    with opened(OWNED) as rig:
        rig.see_death()
        rig.loop.pass_time(1.0)
        tape = owned_tape(rig)
        rig.run(rig.proxy.shutdown())
        assert tape.deeds[:4] == [*TOLD, "link"]
        rest = [deed for deed in tape.deeds[4:] if deed != "kill"]
        assert rest == ["status socket", "monitors", *LANE, "text workers"]


def test_a_world_that_does_not_stop_is_killed_at_its_bound_and_the_rest_ends_all_the_same() -> None:
    with opened(OWNED) as rig:
        tape = owned_tape(rig)
        bound_s = rig.link.limits.stop_live_s_max
        ending = rig.loop.create_task(rig.proxy.shutdown())
        while rig.loop.now_s < bound_s - 1.0:
            for rank in (0, 1):  # they beat, and go on
                rig.loop.do(rig.link.world._feed, Heard(rank))
            rig.loop.pass_time(1.0)
            rig.loop.do(rig.proxy.on_messages, [Heartbeat(0, is_busy=False)])
        assert "kill" not in tape.deeds
        rig.loop.pass_time(5.0)
        rig.loop.pass_time(0.0)
        assert ending.done()
        ends = ["status socket", "monitors", *TOLD, *LANE, "text workers"]
        assert tape.deeds == [*TOLD, "link", "sentinel", "kill", *ends]


def test_a_lane_says_goodbye_while_its_parts_still_stand() -> None:
    with opened(ATTACHED) as rig:
        tape = taped(rig)
        rig.link._caller.deeds = tape.deeds
        tape.on(rig.link._watch, "close", "monitors")
        tape.on(rig.link, "declare_dead", "dead")
        rig.loop.do(rig.proxy.submit, request("r"))
        rig.run(rig.proxy.shutdown())
        intake = [deed for i, deed in enumerate(INTAKE) if i != 2]
        assert tape.deeds[:6] == [*intake, "link", "goodbye"]
        assert tape.deeds[6:] == ["monitors", "dead", *TOLD, *LANE, "caller closed", "text workers"]


def break_(thing: Any, name: str) -> Callable[[], None]:
    """What is returned mends it."""
    whole = getattr(thing, name)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    setattr(thing, name, fail)
    return lambda: setattr(thing, name, whole)


def test_requests_that_cannot_be_told_keep_nobody_behind_them() -> None:
    """Bug: the link tells of its end too, met the same defect there, and left its sockets open."""
    with opened(ATTACHED) as rig:
        tape, told = taped(rig), []
        rig.loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        break_(rig.proxy._requests, "fail_all")
        rig.run(rig.proxy.shutdown())
        assert told == ["a defect"] * 2
        rest = ["calls told", "subscriptions told"]
        assert tape.deeds == [*rest, "link", *rest, *LANE, "text workers"]


def test_a_link_that_cannot_end_keeps_nobody_behind_it() -> None:
    with opened(ATTACHED) as rig:
        tape = taped(rig)
        mend = break_(rig.link, "stop")
        rig.run(rig.proxy.shutdown())
        assert tape.deeds == [*TOLD, "text workers"]
        assert rig.proxy._tick_timer.cancelled()
        mend()
        rig.run(rig.link.stop(is_well=False))  # what that defect has left


def test_it_ends_once_however_often_and_early_it_is_asked() -> None:
    """Also by a thread, which may not wait; and a waiter that gives up takes nobody along."""
    with opened(ATTACHED) as rig:
        tape = taped(rig)
        proxy: Proxy = rig.proxy
        thread = threading.Thread(target=proxy.pre_shutdown)
        thread.start()
        thread.join()
        assert tape.deeds == []  # told to the loop only
        rig.loop.settle()
        assert tape.deeds == TOLD
        first, second = (rig.loop.create_task(proxy.shutdown()) for _ in range(2))
        rig.loop.call_soon(first.cancel)
        rig.loop.settle()
        second.result()
        assert tape.deeds.count("link") == tape.deeds.count("text workers") == 1
        with pytest.raises(asyncio.CancelledError):
            first.result()


def test_a_signal_handler_may_ask_in_the_midst_of_anything() -> None:
    """Bug: on the loop's own thread everything open was told on the spot. A handler that ran in
    the midst of a result's `push` then waited for that result's lock: for ever."""
    with opened(ATTACHED) as rig:
        proxy: Proxy = rig.proxy
        result = rig.loop.do(proxy.submit, request("r"))

        def handle() -> None:
            with result._lock:
                proxy.pre_shutdown()
            with pytest.raises(ServerUnavailableError, match="shutting down"):
                proxy.submit(request("later"))

        rig.loop.do(handle)
        rig.loop.settle()
        assert type(result.error) is ServerUnavailableError
        rig.run(proxy.shutdown())
