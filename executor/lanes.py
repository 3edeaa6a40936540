"""The worker's end of all lanes: where messages come in, and answers go out.

A lane is opened (by the owner's word, at any time), used, and closed: by the
owner's word, for its frontend's silence, or because its frontend does not read.
A closed lane is gone for good; the loop is told and ends its requests.

Sockets of answers are used under one lock by the loop and the heart; sockets of
requests belong to the receiving thread. Nobody waits for a frontend that does
not read, unless it is the owner and the only one: then the engine may as well wait.
What it leaves unread is kept up to a bound of bytes, beside a fast engine for longer
than it may be silent: memory ends a lane, or silence, and no short block of a loop.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from executor.inbox import Inbox, LaneEnded
from executor.ipc import (
    end_context,
    new_context,
)
from executor.lane import OWNER_ID, LaneSpec
from executor.messages import (
    Heartbeat,
    LaneClosed,
    Outputs,
    Ready,
    ToProxy,
)
from executor.post.grouping import divided
from executor.worker_lane import BACKLOG_BYTES_MAX, FULL_BACKLOGS_MAX, WorkerLane
from protos.errors import DuplicateRequestError, OverloadedError

logger = logging.getLogger(__name__)
SEND_SLICE_S = 1.0
LANES_MAX = 1024
PARTINGS_MAX = 64
PARTING_S_MAX = 60.0


class Lanes:
    """See the module's docstring. `open`, `close` and `say` are for any thread."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        clock: Callable[[], float],
        is_stopping: Callable[[], bool],
        queue_messages_max: int,
        message_bytes_max: int,
        look_s: float,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
        on_closed: Callable[[int, str], None] = lambda _id, _why: None,
    ) -> None:
        """Silent lanes are looked for every `look_s`. `on_closed` hears of every lane that is
        closed before the end; it must not wait."""
        self._inbox = inbox
        self._on_closed = on_closed
        self._clock = clock
        self._is_stopping = is_stopping
        self._queue_messages_max = queue_messages_max
        self._message_bytes_max = message_bytes_max
        self._backlog_bytes_max = backlog_bytes_max
        self._look_s = look_s
        self._looked_at_s = clock()
        self._context = new_context()
        self._lock = threading.Lock()
        self._lanes: dict[int, WorkerLane] = {}
        self._arrivals: deque[WorkerLane] = deque()
        self._departures: deque[WorkerLane] = deque()
        self._partings: deque[tuple[WorkerLane, str, float]] = deque()
        """Closed while their frontend's queue was full: why, and until when that is tried to
        be told. Else it would take our silence for our death."""
        self._change_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_shut = False
        self._greeting: Ready | None = None
        self._num_bad_frames = 0
        self.num_unsaid = 0
        """Answers for lanes that were gone."""

    # --- opening and closing --------------------------------------------------

    def open(self, spec: LaneSpec) -> LaneSpec:
        """The spec with the endpoints that were taken. Raises RequestError where it cannot be."""
        with self._lock:
            if spec.frontend_id in self._lanes:
                raise DuplicateRequestError(
                    f"frontend {spec.frontend_id} has a lane already", field="frontend_id"
                )
            if len(self._lanes) >= LANES_MAX:
                raise OverloadedError(
                    f"{LANES_MAX} lanes are open already", field="lanes", limit=LANES_MAX
                )
            lane = WorkerLane(
                spec,
                self._context,
                queue_messages_max=self._queue_messages_max,
                message_bytes_max=self._message_bytes_max,
                now_s=self._clock(),
            )
            self._lanes[spec.frontend_id] = lane
            self._arrivals.append(lane)
            if self._greeting is not None:  # nobody is connected yet
                for body in lane.pack(self._greeting):
                    lane.put_off(body)
        os.eventfd_write(self._change_fd, 1)
        return lane.spec

    def close(self, frontend_id: int, why: str, level: int = logging.INFO) -> None:
        """Unknown and closed ones are ignored. `level` WARNING: its frontend does not know yet."""
        with self._lock:
            lane = self._lanes.get(frontend_id)
            if lane is not None:
                self._close(lane, why, level)

    # --- answers --------------------------------------------------------------

    def greet(self, greeting: Ready) -> None:
        """To every lane, also to those that are opened later."""
        with self._lock:
            self._greeting = greeting
        self.say_all(greeting)

    def say(self, frontend_id: int, message: ToProxy) -> bool:
        """False where we were told to stop before a lone frontend had room for it."""
        if isinstance(message, Outputs):
            message = self._divided(frontend_id, message)
        return all(self._say(frontend_id, body) for body in self._packed(frontend_id, message))

    def _say(self, frontend_id: int, body: msgspec.Raw) -> bool:
        while True:
            with self._lock:
                lane = self._lanes.get(frontend_id)
                if lane is None:
                    self.num_unsaid += 1
                    return True
                if self._send(lane, body):
                    return True
                lane.sender.has_room(SEND_SLICE_S)
            if self._is_stopping():
                return False

    def _packed(self, frontend_id: int, message: ToProxy) -> list[msgspec.Raw]:
        """Not under the lock either. What cannot be told at all is the end of its lane: its
        frontend would wait for it."""
        lane = self._lanes.get(frontend_id)
        if lane is None:
            self.num_unsaid += 1
            return []
        bodies = lane.pack(message)
        if not bodies:
            why = f"a {type(message).__name__} for it cannot be sent"
            self.close(frontend_id, why, logging.WARNING)
        return bodies

    def _divided(self, frontend_id: int, message: Outputs) -> Outputs:
        """Not under the lock: it is work, and its lane's frontend may well be gone meanwhile."""
        lane = self._lanes.get(frontend_id)
        num_buckets = 0 if lane is None else lane.spec.num_buckets
        return divided(message, num_buckets) if num_buckets > 0 else message

    def say_all(self, message: ToProxy) -> None:
        for frontend_id in list(self._lanes):
            self.say(frontend_id, message)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Left out where a frontend does not read: the next one tells more."""
        if self._lock.acquire(timeout=SEND_SLICE_S):
            try:
                for lane in self._lanes.values():
                    if lane.flush():
                        lane.sender.send(heartbeat)
                self._part()
            finally:
                self._lock.release()

    def flush(self) -> bool:
        """True where nothing waits for room any more."""
        with self._lock:
            waiting = [lane for lane in self._lanes.values() if not lane.flush()]
        return not waiting

    # --- the receiving thread -------------------------------------------------

    def receive_until_closed(self) -> None:
        """The receiving thread's whole life: frames in, letters to the inbox."""
        poller = zmq.Poller()
        poller.register(self._change_fd, zmq.POLLIN)
        lanes: dict[zmq.Socket[bytes], WorkerLane] = {}
        self._looked_at_s = self._clock()
        try:
            while not self._is_shut:
                ready = dict(poller.poll(self._until_look_ms()))
                self._take_changes(poller, lanes)
                now_s = self._clock()
                for socket, lane in lanes.items():
                    if socket in ready:
                        self._inbox.put(lane.drain(self._queue_messages_max, now_s))
                        if lane.fault:
                            self.close(lane.spec.frontend_id, lane.fault, logging.WARNING)
                self._close_silent(lanes.values())
        except zmq.ContextTerminated:
            pass  # the other way in which the main thread ends us: where we wait for a lane
        self._take_changes(poller, lanes)
        for socket in lanes:
            socket.close(linger=0)
        os.close(self._change_fd)

    def _until_look_ms(self) -> int:
        left_s = self._looked_at_s + self._look_s - self._clock()
        return int(max(0.0, left_s) * 1000) + 1

    def _close_silent(self, lanes: Iterable[WorkerLane]) -> None:
        """Frontends that nobody watches show their life by a Beat. This thread judges them since
        it alone reads: what lies over `look_s` between two looks was our own standstill (stopped,
        starved, no room in the inbox), their beats may be unread, and none is blamed for it."""
        now_s = self._clock()
        passed_s = now_s - self._looked_at_s
        if passed_s < self._look_s:
            return
        self._looked_at_s = now_s
        for lane in lanes:
            lane.heard_at_s = min(now_s, lane.heard_at_s + passed_s - self._look_s)
            bound_s = lane.spec.silence_s
            if bound_s and now_s - lane.heard_at_s > bound_s:
                why = f"nothing was heard from it for {bound_s:g} s"
                self.close(lane.spec.frontend_id, why, logging.WARNING)

    def _take_changes(self, poller: zmq.Poller, lanes: dict[zmq.Socket[bytes], WorkerLane]) -> None:
        try:
            os.eventfd_read(self._change_fd)
        except BlockingIOError:
            return
        while self._arrivals:
            lane = self._arrivals.popleft()
            lanes[lane.receiver.socket] = lane
            poller.register(lane.receiver.socket, zmq.POLLIN)
        while self._departures:
            lane = self._departures.popleft()
            if lanes.pop(lane.receiver.socket, None) is not None:
                poller.unregister(lane.receiver.socket)
            lane.receiver.socket.close(linger=0)

    # --- the end --------------------------------------------------------------

    def shut(self, *, has_receiver: bool) -> None:
        """Let the last words out, bounded by the sockets' linger; then no lane is left."""
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
            while self._partings:
                self._partings.popleft()[0].sender.socket.close()
        for lane in lanes:
            lane.sender.socket.close()
            if not has_receiver:
                lane.receiver.socket.close(linger=0)
        while self._departures and not has_receiver:
            self._departures.popleft().receiver.socket.close(linger=0)
        self._is_shut = True
        if has_receiver:  # it closes its own sockets and the descriptor
            os.eventfd_write(self._change_fd, 1)
        else:
            os.close(self._change_fd)
        end_context(self._context)

    @property
    def num_bad_frames(self) -> int:
        with self._lock:
            return self._num_bad_frames + sum(lane.opener.num_bad for lane in self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def _send(self, lane: WorkerLane, body: msgspec.Raw) -> bool:
        """False where the caller should wait: the frontend is the owner, alone and slow."""
        if lane.send(body):
            return True
        if len(self._lanes) == 1 and lane.spec.frontend_id == OWNER_ID:
            return False
        lane.put_off(body)
        self._bound_backlogs(lane)
        return True

    def _bound_backlogs(self, grown: WorkerLane) -> None:
        """By bytes, and not before a second message waits: one alone may be larger than the
        bound. Where all of them together are too much, the one that holds most ends."""
        if grown.backlog_bytes > self._backlog_bytes_max and grown.num_waiting > 1:
            self._close_unread(grown)
            return
        lanes = self._lanes.values()
        if sum(each.backlog_bytes for each in lanes) > self._backlog_bytes_max * FULL_BACKLOGS_MAX:
            self._close_unread(max(lanes, key=lambda each: each.backlog_bytes))

    def _close_unread(self, lane: WorkerLane) -> None:
        waiting = f"{lane.num_waiting} messages of {lane.backlog_bytes} bytes wait"
        self._close(lane, f"it does not read its answers: {waiting}")

    def _close(self, lane: WorkerLane, why: str, level: int = logging.WARNING) -> None:
        frontend_id = lane.spec.frontend_id
        del self._lanes[frontend_id]
        lane.drop_backlog()
        logger.log(level, "the lane of frontend %d is closed: %s", frontend_id, why)
        if lane.sender.send(LaneClosed(why)) or level == logging.INFO:
            lane.sender.socket.close()  # it knows: it has left, or has just been told
        else:
            self._partings.append((lane, why, self._clock() + PARTING_S_MAX))
        self._num_bad_frames += lane.opener.num_bad
        self._departures.append(lane)
        os.eventfd_write(self._change_fd, 1)
        self._inbox.tell(frontend_id, LaneEnded(why))
        self._on_closed(frontend_id, why)

    def _part(self) -> None:
        """Each hears why its lane is closed as soon as its queue has room."""
        for _ in range(len(self._partings)):
            lane, why, ends_at_s = self._partings.popleft()
            is_late = self._clock() >= ends_at_s or len(self._partings) >= PARTINGS_MAX
            if lane.sender.send(LaneClosed(why)) or is_late:
                lane.sender.socket.close()
            else:
                self._partings.append((lane, why, ends_at_s))
