"""One engine's data plane: a thread that owns the transport and runs every session.

    starting --transport open--> running --close()--> closed
                                    |
                                    +--an exception--> failed (first cause kept)

The engine's thread gives commands and drains events; `wake` tells it that
events wait. `offer`, `release` and `renew` answer at once from the lease table.
However the thread ends, the transport is closed first, and only then does every
open pull fail and every transfer end, since only then nothing touches the
blocks. After a failure `drain_events` raises once the last event was taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, assert_never

from kv_transfer import frames
from kv_transfer.events import (
    Offer,
    PoolMemory,
    Pull,
    PullFailed,
    TransceiverAudit,
    TransceiverEvent,
    TransferLimits,
)
from kv_transfer.links import Links
from kv_transfer.memory import BlockMemory
from kv_transfer.outbox import Outbox
from kv_transfer.source_side import SourceSide
from kv_transfer.target_side import TargetSide, cancelled_error, closed_error
from kv_transfer.transport import (
    FrameReceived,
    PeerDown,
    SegmentReceived,
    SegmentSent,
    Transport,
    TransportEvent,
)
from protos.errors import BatonError, InternalError, OverloadedError
from protos.messages import DisaggRequestId

START_S_MAX = 60.0
CLOSE_S_MAX = 15.0
IDLE_S_MAX = 60.0

_Command: TypeAlias = Callable[[float], None]
_log = logging.getLogger(__name__)


class Transceiver:
    """See the module's docstring. One engine thread calls; `wake` is called from ours."""

    def __init__(
        self,
        transport_factory: Callable[[], Transport],
        *,
        incarnation: int,
        memory: PoolMemory,
        limits: TransferLimits,
        wake: Callable[[], None],
    ) -> None:
        """Raises what the factory raises, e.g. ConfigError where UCX does not start."""
        self._transport_factory = transport_factory
        self._incarnation = incarnation
        self._pool = memory
        self._limits = limits
        self._wake = wake
        self._outbox = Outbox(limits.tombstones_max)
        self._commands: deque[_Command] = deque()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._is_over = False
        self._started = threading.Event()
        self._address = b""
        self._wires = ""
        self._has_seen_wires = False
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._main, name="kv-transceiver", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S_MAX):
            raise InternalError(f"the transport did not open in {START_S_MAX:g} s")
        self._raise_failed_start()

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def wires(self) -> str:
        """Which wires are in use as far as this side has seen."""
        return self._wires

    def offer(self, offer: Offer) -> None:
        self._outbox.offer(offer, time.monotonic())
        self._nudge()

    def pull(self, pull: Pull) -> None:
        num_waiting = len(self._commands) + len(self._target)
        if num_waiting >= self._limits.frame_queue_max:
            error = OverloadedError(
                f"{num_waiting} pulls wait for the data plane",
                field="pull",
                value=num_waiting,
                limit=self._limits.frame_queue_max,
            )
            self._outbox.put(PullFailed(pull.disagg_request_id, error.to_data()))
            self._nudge()
            return
        self._give(lambda now: self._target.pull(pull, now))

    def abort_pull(self, disagg_request_id: DisaggRequestId) -> None:
        """Unknown and finished ids are ignored. The answer is the pull's one event."""
        error = cancelled_error()
        self._give(lambda now: self._target.abort(disagg_request_id, error, now))

    def release(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        was_live = self._outbox.release(disagg_request_id, pull_token)
        if was_live:
            self._give(lambda now: self._source.on_lease_over(disagg_request_id, "released", now))
        return was_live

    def renew(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return self._outbox.renew(disagg_request_id, pull_token, time.monotonic())

    def drain_events(self) -> list[TransceiverEvent]:
        """What happened since the last call. Raises InternalError once the thread has failed."""
        is_over, failure = self._is_over, self._failure
        events = self._outbox.drain()
        if is_over and failure is not None and not events:
            raise InternalError(f"the data plane failed: {_describe(failure)}") from failure
        return events

    def audit(self) -> TransceiverAudit:
        """Counts as of now; exact once the engine's own commands are through."""
        return TransceiverAudit(
            leases=self._outbox.num_leases(),
            transfers=len(self._source),
            pulls=len(self._target) + len(self._commands),
            operations=self._source.num_operations + self._target.num_operations,
            peers=len(self._links),
            counters=self._outbox.counters(),
        )

    def close(self) -> None:
        """Bounded and idempotent. Afterwards nothing touches the pool, or InternalError says so."""
        self._is_closing = True
        self._nudge()
        self._thread.join(CLOSE_S_MAX)
        if self._thread.is_alive():
            raise InternalError(f"the data plane did not close in {CLOSE_S_MAX:g} s")

    def _raise_failed_start(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _give(self, command: _Command) -> None:
        self._commands.append(command)
        self._nudge()

    def _nudge(self) -> None:
        transport = self._transport
        if transport is not None and not self._is_over:
            transport.wake()

    def _main(self) -> None:
        try:
            self._open()
            self._started.set()
            self._run()
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                _log.exception("the KV transceiver failed")
        finally:
            self._finish()
            self._is_over = True
            self._started.set()
            self._wake()

    def _open(self) -> None:
        transport = self._transport_factory()
        memory = BlockMemory(self._pool)
        links = Links(transport, self._incarnation, self._limits)
        layout_digest = frames.layout_digest(self._pool.layout)
        common = (transport, links, self._outbox, memory)
        self._links = links
        self._source = SourceSide(*common, self._limits, self._incarnation, layout_digest)
        self._target = TargetSide(
            *common, self._pool, self._limits, self._incarnation, self._see_wires
        )
        self._address = transport.address
        self._wires = transport.describe()
        self._transport = transport

    def _run(self) -> None:
        assert self._transport is not None
        ticked_at = time.monotonic()
        while not self._is_closing:
            timeout_s = self._timeout(time.monotonic())
            events = self._transport.poll(timeout_s)
            now = time.monotonic()
            for event in events:
                self._on_event(event, now)
            while self._commands:
                self._commands.popleft()(now)
            if now - ticked_at - timeout_s > self._limits.stall_s / 2:
                self._links.excuse(now)
            ticked_at = now
            self._tick(now)
            if self._outbox.has_events():
                self._wake()

    def _timeout(self, now: float) -> float:
        if self._commands:
            return 0.0
        timeout_s = IDLE_S_MAX
        expiry = self._outbox.next_expiry()
        if expiry is not None:
            timeout_s = min(timeout_s, max(0.0, expiry - now))
        if len(self._source) or len(self._target):
            timeout_s = min(timeout_s, self._limits.heartbeat_s / 4, self._limits.stall_s / 8)
        return timeout_s

    def _tick(self, now: float) -> None:
        for key in self._outbox.expire(now):
            self._source.on_lease_over(key, "expired", now)
        self._source.tick(now)
        self._target.tick(now)
        self._links.ping_due(now)

    def _on_event(self, event: TransportEvent, now: float) -> None:
        match event:
            case FrameReceived(data):
                self._on_frame(data, now)
            case SegmentSent(operation, error):
                if not self._source.on_sent(operation, error, now):
                    self._outbox.count("unknown_operations")
                if not self._has_seen_wires:
                    self._see_wires()
            case SegmentReceived(operation, error):
                if not self._target.on_received(operation, error, now):
                    self._outbox.count("unknown_operations")
            case PeerDown(peer, cause):
                self._outbox.count("peers_lost")
                self._source.on_peer_down(peer, cause, now)
                self._target.on_peer_down(peer, cause, now)
                self._links.forget(peer)
            case _:
                assert_never(event)

    def _on_frame(self, data: bytes, now: float) -> None:
        frame = frames.decode(data)
        if frame is None:
            self._outbox.count("bad_frames")
            return
        link = self._links.of_sender(frame.sender)
        if link is not None:
            link.heard_at = now
        match frame:
            case frames.PullFrame():
                self._source.on_pull(frame, now)
            case frames.Announce() | frames.Stopped():
                self._target.on_frame(frame, now)
            case frames.Credit() | frames.Resend() | frames.Ack() | frames.Abort():
                self._source.on_frame(frame, now)
            case frames.Ping() if link is not None:
                self._links.send(link, frames.Pong(sender=self._incarnation))
            case frames.Ping():
                self._outbox.count("unknown_senders")
            case frames.Pong():
                pass
            case _:
                assert_never(frame)

    def _see_wires(self) -> str:
        assert self._transport is not None
        self._has_seen_wires = True
        self._wires = self._transport.describe()
        return self._wires

    def _finish(self) -> None:
        """Close first, then tell: an event must not free blocks that UCX may still touch."""
        if self._transport is None:
            return
        try:
            self._transport.close()
        except Exception as error:
            self._failure = self._failure or error
            _log.exception("the KV transport did not close")
        cause = "closed" if self._failure is None else _describe(self._failure)
        while self._commands:
            self._commands.popleft()
        self._target.end_all(closed_error(cause))
        self._outbox.end_all_leases("closed")
        self._source.end_all()


def _describe(error: BaseException) -> str:
    if isinstance(error, BatonError):
        return f"{type(error).__name__}: {error.message}"
    return f"{type(error).__name__}: {error}"
