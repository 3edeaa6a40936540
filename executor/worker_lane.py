"""One frontend's sockets at the worker, and the answers that wait for it.

What a frontend does not read lies in its socket first, then in its lane's backlog, which
is bounded by bytes: a block of the frontend's loop beside a fast engine is many messages
and little memory. What may lie there in all is bounded too; see `Lanes`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgspec
import zmq

from executor.inbox import Letter
from executor.ipc import (
    TO_PROXY,
    TO_WORKER,
    FrameOpener,
    FrameReceiver,
    FrameSealer,
    FrameSender,
    open_pair,
)
from executor.lane import LaneSpec
from executor.messages import Batch, ToProxy, ToWorker, WorkerFrame
from executor.packing import body_bytes_max, packed_answers

BACKLOG_BYTES_MAX: Final = 32 << 20
"""Of one lane: 256 streams at 100,000 tokens a second make about 2 MB of answers a second, so
it holds longer than a frontend may be silent by default."""
FULL_BACKLOGS_MAX: Final = 8
"""So many full backlogs may lie in the worker's memory, in however many lanes."""
BODY_OVERHEAD_BYTES: Final = 128
"""What Python takes for a message beside its bytes: a step's may be shorter than that."""
LINGER_MS = 2000
_WORKER_FRAME: Any = WorkerFrame


class WorkerLane:
    """Used by several threads, each for its part: see lanes.py. `heard_at_s`: its last word."""

    def __init__(
        self,
        spec: LaneSpec,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        queue_messages_max: int,
        message_bytes_max: int,
        now_s: float,
    ) -> None:
        def opened(endpoint: str) -> zmq.Socket[bytes]:
            return open_pair(
                context,
                endpoint,
                is_server=spec.worker_binds,
                queue_messages_max=queue_messages_max,
                message_bytes_max=message_bytes_max,
                linger_ms=LINGER_MS,
                curve_secret_key=spec.curve_secret_key,
                curve_server_key=spec.curve_server_key,
            )

        requests = opened(spec.requests_endpoint)
        try:
            results = opened(spec.results_endpoint)
        except BaseException:
            requests.close(linger=0)
            raise
        self.opener: FrameOpener[WorkerFrame] = FrameOpener(spec.key, TO_WORKER, _WORKER_FRAME)
        self.receiver = FrameReceiver(requests, self.opener)
        self.sender = FrameSender(results, FrameSealer(spec.key, TO_PROXY))
        self._backlog: deque[msgspec.Raw] = deque()
        self.backlog_bytes = 0
        """What the backlog takes; 0 where nothing waits."""
        self._answer_bytes_max = body_bytes_max(message_bytes_max)
        self.heard_at_s = now_s
        self.spec = spec
        if spec.worker_binds:
            self.spec = msgspec.structs.replace(
                spec, requests_endpoint=_bound(requests), results_endpoint=_bound(results)
            )

    def pack(self, message: ToProxy) -> list[msgspec.Raw]:
        """As it can be sent; see packing.py."""
        return packed_answers(message, self._answer_bytes_max)

    @property
    def num_waiting(self) -> int:
        return len(self._backlog)

    @property
    def fault(self) -> str:
        """Why it cannot be trusted any more: a message that was lost is an answer that nobody
        waits for, or a request that its frontend believes here."""
        if self.opener.num_lost:
            return f"its connection broke, and {self.opener.num_lost} frames are lost"
        if self.opener.num_malformed:
            return f"{self.opener.num_malformed} of its messages cannot be read"
        return ""

    def send(self, body: msgspec.Raw) -> bool:
        """Behind what waits. False where it must wait too."""
        return self.flush() and self.sender.send(body)

    def flush(self) -> bool:
        if self._backlog and not self.sender.has_room():
            return False  # asked first: a large message is not sealed again and again in vain
        while self._backlog:
            if not self.sender.send(self._backlog[0]):
                return False
            self.backlog_bytes -= _weight(self._backlog.popleft())
        return True

    def put_off(self, body: msgspec.Raw) -> None:
        """Its user bounds what waits."""
        self._backlog.append(body)
        self.backlog_bytes += _weight(body)

    def drop_backlog(self) -> None:
        self._backlog.clear()
        self.backlog_bytes = 0

    def drain(self, messages_max: int, now_s: float) -> list[Letter]:
        frames = self.receiver.drain(messages_max)
        if frames:
            self.heard_at_s = now_s
        frontend_id = self.spec.frontend_id
        return [(frontend_id, message) for frame in frames for message in _unpacked(frame)]


def _unpacked(frame: WorkerFrame) -> tuple[ToWorker, ...]:
    return frame.messages if isinstance(frame, Batch) else (frame,)


def _bound(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


def _weight(body: msgspec.Raw) -> int:
    return memoryview(body).nbytes + BODY_OVERHEAD_BYTES
