"""Rank 0's side of the leader socket: members join, collective calls go out, answers come in.

Life: bound at construction (members are told the endpoint by the owner), started, closed.
One thread owns the socket; the engine's loop only queues a call and is told of the answers
through a future, so it never waits for a member.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from executor.control_desk import RankAnswer
from executor.ipc import Context
from executor.packing import body_bytes_max
from executor.world.collective import (
    LINK,
    Answer,
    FromMember,
    Join,
    JoinAck,
    MemberBeat,
    MemberCall,
    MemberStop,
    MemberSubmit,
    RankValue,
    packed,
)
from executor.world.frames import RankRouter, SocketBounds, open_router
from protos.errors import BatonError, ErrorData, RequestFailedError, ServerUnavailableError

CLOSE_S_MAX = 2.0
LOOKS_EVERY_S = 0.25
CALLS_MAX = 64
Values = tuple[RankAnswer, ...]


@dataclass(slots=True)
class _Pending:
    method: str
    ends_at_s: float
    timeout_s: float
    future: Future[Values]
    values: dict[int, RankValue] = field(default_factory=dict)


class Leader(threading.Thread):
    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        key: bytes,
        num_ranks: int,
        bounds: SocketBounds,
    ) -> None:
        super().__init__(name="leader", daemon=True)
        socket, self.endpoint, self.curve_key = open_router(context, endpoint, bounds)
        self._router: RankRouter[FromMember] = RankRouter(socket, LINK, key, num_ranks, FromMember)
        self._members = tuple(range(1, num_ranks))
        self._bytes_max = body_bytes_max(bounds.message_bytes_max)
        self._outgoing: deque[tuple[int, int, msgspec.Raw]] = deque()
        """Rank, the call that it is about (0: none), and what is sent."""
        self._pending: dict[int, _Pending] = {}
        self._next_call_id = 1
        self._condition = threading.Condition()
        self._joined: set[int] = set()
        self._heard_at_s: dict[int, float] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_closing = False

    # --- from the engine's thread ---------------------------------------------

    @property
    def num_bad_frames(self) -> int:
        return self._router.num_bad

    def wait_joined(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: len(self._joined) == len(self._members), timeout_s
            )

    @property
    def has_room(self) -> bool:
        """Whether one more call can be made. Asked by the only thread that makes any, so that
        it stays true until its next call."""
        with self._condition:
            return not self._is_closing and len(self._pending) < CALLS_MAX

    def call_all(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Future[Values]:
        """Ask every member; never waits. The future holds their values in order of rank, an
        error's data where a member failed or did not answer in time, and is set on the
        leader's own thread.
        """
        return self._ask(
            method, timeout_s, lambda call_id: MemberCall(call_id, method, dict(arguments))
        )

    def submit_to_members(self, request: Any, timeout_s: float) -> Future[Values]:
        """What no member can do: each answers with the error that says who can."""
        return self._ask("submit", timeout_s, lambda call_id: MemberSubmit(call_id, request))

    def stop_members(self) -> None:
        """They end after what was sent before."""
        with self._condition:
            stop = msgspec.Raw(msgspec.msgpack.encode(MemberStop()))
            self._outgoing.extend((rank, 0, stop) for rank in self._members)
        self._wake()

    def close(self) -> None:
        """What was queued is sent first; calls that wait end with an error."""
        with self._condition:
            self._is_closing = True
        self._wake()
        self.join(CLOSE_S_MAX)

    def _ask(self, method: str, timeout_s: float, make: Callable[[int], object]) -> Future[Values]:
        future: Future[Values] = Future()
        with self._condition:
            try:
                self._check_room(method)
                call_id = self._next_call_id
                body = packed(make(call_id), "arguments", method, self._bytes_max)
            except BatonError as refusal:
                error = refusal.to_data()
                future.set_result(tuple(RankValue(rank, error=error) for rank in self._members))
                return future
            self._next_call_id += 1
            ends_at_s = time.monotonic() + timeout_s
            self._pending[call_id] = _Pending(method, ends_at_s, timeout_s, future)
            self._outgoing.extend((rank, call_id, body) for rank in self._members)
        self._wake()
        return future

    def _check_room(self, method: str) -> None:
        if self._is_closing or len(self._pending) >= CALLS_MAX:
            why = "the world is ending" if self._is_closing else f"{CALLS_MAX} calls wait"
            raise ServerUnavailableError(f"{method}: {why}")

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # --- the thread -----------------------------------------------------------

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._is_closing:
            wait_ms = int(LOOKS_EVERY_S * 1000) if self._pending else None
            if any(fd == self._wake_fd for fd, _ in poller.poll(wait_ms)):
                os.eventfd_read(self._wake_fd)
            for rank, message in self._router.drain():
                self._on_message(rank, message)
            self._send_outgoing()
            self._end_calls(self._expired(time.monotonic()))
        self._send_outgoing()
        self._end_calls(list(self._pending))
        self._router.socket.close(linger=int(CLOSE_S_MAX * 500))
        os.close(self._wake_fd)

    def _on_message(self, rank: int, message: FromMember) -> None:
        self._heard_at_s[rank] = time.monotonic()
        match message:
            case Join():
                with self._condition:
                    self._joined.add(rank)
                    self._condition.notify_all()
                self._router.send(rank, JoinAck())
            case Answer():
                self._on_answer(rank, message)
            case MemberBeat():
                pass

    def _on_answer(self, rank: int, message: Answer) -> None:
        call = self._pending.get(message.call_id)
        if call is None or rank not in self._members:
            return
        call.values.setdefault(rank, RankValue(rank, message.value, message.error))
        if len(call.values) == len(self._members):
            self._end_calls([message.call_id])

    def _send_outgoing(self) -> None:
        while True:
            with self._condition:
                if not self._outgoing:
                    return
                rank, call_id, body = self._outgoing.popleft()
            if not self._router.send(rank, body) and call_id:
                error = ServerUnavailableError(f"rank {rank} cannot be reached").to_data()
                self._on_answer(rank, Answer(call_id, error=error))

    def _expired(self, now_s: float) -> list[int]:
        return [call_id for call_id, call in self._pending.items() if now_s >= call.ends_at_s]

    def _end_calls(self, call_ids: list[int]) -> None:
        for call_id in call_ids:
            with self._condition:
                call = self._pending.pop(call_id)
            call.future.set_result(
                tuple(
                    call.values.get(rank) or RankValue(rank, error=self._unanswered(rank, call))
                    for rank in self._members
                )
            )

    def _unanswered(self, rank: int, call: _Pending) -> ErrorData:
        if self._is_closing:
            return ServerUnavailableError(f"{call.method}: the world is ending").to_data()
        heard_at_s = self._heard_at_s.get(rank)
        ago = "never" if heard_at_s is None else f"{time.monotonic() - heard_at_s:.1f} s ago"
        return RequestFailedError(
            f"{call.method}: rank {rank} did not answer within {call.timeout_s:g} s; "
            f"it was last heard {ago}"
        ).to_data()
