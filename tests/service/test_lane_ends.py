"""How a frontend hears that its lane was closed or cannot be had, over real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from executor.engine.seam import EngineOutput
from executor.inbox import Inbox, LaneEnded, Letter
from executor.ipc import TO_PROXY, FrameOpener, FrameReceiver, open_pair
from executor.lane import LaneSpec
from executor.lanes import Lanes
from executor.messages import Heartbeat, LaneClosed, Outputs, ToProxy
from executor.worker_lane import BACKLOG_BYTES_MAX, FULL_BACKLOGS_MAX
from executor.world.frames import SocketBounds
from executor.world.leading import Leading
from executor.world.messages import LaneOpened, OpenLane
from tests.support.led_members import orders

MESSAGES_MAX = 8
BYTES_MAX = 1 << 20
LOOK_S = 0.01


def spec(folder: Path, frontend_id: int, silence_s: float = 0.0) -> LaneSpec:
    return LaneSpec(
        frontend_id=frontend_id,
        key=b"k" * 32,
        requests_endpoint=f"ipc://{folder}/{frontend_id}q",
        results_endpoint=f"ipc://{folder}/{frontend_id}r",
        worker_binds=True,
        silence_s=silence_s,
    )


def lanes_of(
    inbox: Inbox,
    *,
    clock: Callable[[], float] = time.monotonic,
    backlog_bytes_max: int = BACKLOG_BYTES_MAX,
) -> Lanes:
    return Lanes(
        inbox,
        clock=clock,
        is_stopping=lambda: False,
        queue_messages_max=MESSAGES_MAX,
        message_bytes_max=BYTES_MAX,
        look_s=LOOK_S,
        backlog_bytes_max=backlog_bytes_max,
    )


def test_a_frontend_that_did_not_read_is_told_why_its_lane_is_closed(tmp_path: Path) -> None:
    """Bug: its queue was full, so the word of the closing was dropped too. A frontend whose own
    loop had stood still for 7 s then blamed a healthy worker: "has said nothing for 4.0 s"."""
    lanes = lanes_of(Inbox(64), backlog_bytes_max=BYTES_MAX)
    lane = spec(tmp_path, 3)
    lanes.open(lane)
    receiving = threading.Thread(target=lanes.receive_until_closed)
    receiving.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_pair(
        context,
        lane.results_endpoint,
        is_server=False,
        queue_messages_max=1,
        message_bytes_max=BYTES_MAX,
        linger_ms=0,
    )
    try:
        large = Outputs((), (EngineOutput(request_id=1, token_ids=tuple(range(50_000))),))
        for _ in range(1000):
            lanes.say(3, large)
        assert len(lanes) == 0
        opener: FrameOpener[ToProxy] = FrameOpener(lane.key, TO_PROXY, ToProxy)  # type: ignore[arg-type]
        receiver = FrameReceiver(socket, opener)
        heard: list[ToProxy] = []
        ends_at_s = time.monotonic() + 5.0
        while not (heard and isinstance(heard[-1], LaneClosed)):
            assert time.monotonic() < ends_at_s, "it was never told"
            heard += receiver.drain(16)
            lanes.beat(Heartbeat(1, False, False))
        assert "does not read" in heard[-1].why
        assert opener.num_lost == 0
    finally:
        socket.close(linger=0)
        lanes.shut(has_receiver=True)
        receiving.join()
        context.term()


def test_a_short_block_of_a_frontends_loop_costs_nothing(tmp_path: Path) -> None:
    """Bug: the backlog was bounded by a number of messages, so 2 s of a blocked loop beside a fast
    engine (2,000 small messages a second) ended that frontend's executor for good. Whoever
    reads again gets all of it in order, also while the engine has something else to do."""
    lanes = lanes_of(Inbox(64))
    lane, num_all = spec(tmp_path, 3), 5000
    lanes.open(lane)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for index in range(num_all):
            lanes.say(3, Outputs((index,), ()))
        assert not lanes.flush()
        socket = open_pair(
            context,
            lane.results_endpoint,
            is_server=False,
            queue_messages_max=MESSAGES_MAX,
            message_bytes_max=BYTES_MAX,
            linger_ms=0,
        )
        opener: FrameOpener[ToProxy] = FrameOpener(lane.key, TO_PROXY, ToProxy)  # type: ignore[arg-type]
        receiver = FrameReceiver(socket, opener)
        heard: list[ToProxy] = []
        ends_at_s = time.monotonic() + 20.0
        while len(heard) < num_all:
            assert time.monotonic() < ends_at_s, f"{len(heard)} came"
            lanes.flush()
            heard += receiver.drain(64)
        assert heard == [Outputs((index,), ()) for index in range(num_all)]
        assert lanes.flush()
        socket.close(linger=0)
    finally:
        lanes.shut(has_receiver=False)
        context.term()


def test_backlogs_are_bounded_in_all_and_who_holds_most_ends(tmp_path: Path) -> None:
    """Guards the worker's memory: a thousand frontends, each just under its own bound. And a bug:
    lanes that were closed before anything was received kept the end of all waiting for ever."""
    inbox = Inbox(64)
    lanes = lanes_of(inbox, backlog_bytes_max=10_000)
    tenth = Outputs((), (EngineOutput(request_id=1, token_ids=(1,) * 850),))  # of the own bound
    all_of_them = range(1, FULL_BACKLOGS_MAX + 2)
    try:
        for frontend_id in all_of_them:
            lanes.open(spec(tmp_path, frontend_id))
            for _ in range(10 if frontend_id == 4 else 8):
                lanes.say(frontend_id, tenth)
        for frontend_id in (1, 2, 3, 5, 6, 7):
            lanes.say(frontend_id, tenth)
        assert not inbox.take(0), "80 tenths may wait"
        lanes.say(8, tenth)
        assert [frontend_id for frontend_id, _ in inbox.take(0)] == [4]
        for _ in range(2):
            lanes.say(1, tenth)
        assert [frontend_id for frontend_id, _ in inbox.take(0)] == [1], "it had more than its own"
        assert len(lanes) == len(all_of_them) - 2
    finally:
        lanes.shut(has_receiver=False)


def test_no_frontend_is_blamed_for_a_standstill_of_rank_0(tmp_path: Path) -> None:
    """Bug: after a SIGSTOP rank 0 closed the lanes of frontends that had beaten all along, before
    it read what lay in their sockets. Who really says nothing still loses its lane."""
    now_s = 100.0
    inbox, silence_s = Inbox(64), 20 * LOOK_S
    lanes = lanes_of(inbox, clock=lambda: now_s)
    lanes.open(spec(tmp_path, 3, silence_s))
    lanes.open(spec(tmp_path, 4))  # its owner sees whether it lives
    receiving = threading.Thread(target=lanes.receive_until_closed)
    receiving.start()

    def stand_still(passed_s: float) -> list[Letter]:
        """Until the next look, which is the first one after it."""
        nonlocal now_s
        now_s += passed_s
        ends_at_s = time.monotonic() + 5.0
        while lanes._looked_at_s != now_s:
            assert time.monotonic() < ends_at_s, "it does not look"
            time.sleep(LOOK_S / 10)
        return inbox.take(0)

    try:
        stand_still(LOOK_S)
        for _ in range(5):  # no beat is read between them
            assert not stand_still(10 * silence_s)
        for _ in range(10):  # the share of its silence that was not ours
            assert not stand_still(LOOK_S)
        closed = [letter for _ in range(20) for letter in stand_still(LOOK_S)]
        assert closed == [(3, LaneEnded(f"nothing was heard from it for {silence_s:g} s"))]
        assert len(lanes) == 1
    finally:
        lanes.shut(has_receiver=True)
        receiving.join()


def test_a_frontend_for_whom_no_file_is_left_is_refused_at_once(tmp_path: Path) -> None:
    """Bug: strangers' connections had taken every descriptor of rank 0. A new frontend's lane met
    an untranslated ZMQError there, and waited 10 s for an answer that did not come."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    said: list[object] = []
    taken: list[int] = []
    bounds = SocketBounds(MESSAGES_MAX, BYTES_MAX)

    def say(message: object) -> bool:
        said.append(message)
        return True

    leading = Leading(orders(0, 1), context, bounds, say)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        leading.on_command(OpenLane(spec(tmp_path, 1)))  # starts zmq's own threads
        num_open = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for frontend_id in range(2, 12):
            leading.on_command(OpenLane(spec(tmp_path, frontend_id)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
        leading.close()
        context.term()
    opened = [message for message in said if isinstance(message, LaneOpened)]
    assert len(opened) == 11
    assert opened[0].error is None
    for message in opened[1:]:
        assert message.error is not None
        assert message.error.kind in ("OverloadedError", "ServerUnavailableError")
