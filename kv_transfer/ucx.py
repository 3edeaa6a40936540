"""The real transport: UCX tagged messages with gather lists, on a loop that sleeps.

A peer's life: `connect` makes an endpoint by worker address; an error callback
or `close_peer` starts its closing; when UCX has ended the endpoint, receives
that no message ever met are cancelled (only then is that safe); when the last
operation has ended, `PeerDown` is said. Both sides keep an endpoint of their own.

Error handling is on for every endpoint, and `MM_ERROR_HANDLING` with it, since
UCX otherwise drops shared memory without a word. Settings go to UCX as a dict;
the environment is neither read nor left changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from kv_transfer.transport import (
    FRAME_BYTES_MAX,
    PeerDown,
    Region,
    SegmentReceived,
    SegmentSent,
    TransportEvent,
)
from kv_transfer.ucx_binding import (
    IN_PROGRESS,
    ErrorCallback,
    Ucp,
    import_ucxx,
    iov_array,
    without_environment,
)
from kv_transfer.ucx_frames import FrameReader, control_tag
from protos.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from kv_transfer.factory import TransportSettings

_SEGMENT = 2 << 48
_DIGEST_BYTES = 8
_PROGRESS_ROUNDS_MAX = 256
_CLOSING_TICK_S = 0.005
_STUCK_FACTOR = 5


@dataclass(slots=True)
class _Peer:
    number: int
    address: bytes
    endpoint: int
    is_closing: bool = False
    closing_request: int = 0
    closing_cause: str = ""
    closing_since: float = 0.0


@dataclass(slots=True)
class _Operation:
    """A UCX request and what must stay alive until it ended."""

    request: int
    peer: int
    kind: str
    buffer: ctypes.Array[Any]
    num_bytes: int = 0
    is_cancelled: bool = False


class UcxTransport:
    """See kv_transfer.transport for the contract."""

    name = "ucx"

    def __init__(self, settings: TransportSettings) -> None:
        self._ucxx = import_ucxx()
        self._ucp = Ucp()
        self._settings = settings
        self._numbers = itertools.count(1)
        self._peers: dict[int, _Peer] = {}
        self._operations: dict[int, _Operation] = {}
        self._events: deque[TransportEvent] = deque()
        self._lost: deque[int] = deque()
        self._on_lost = ErrorCallback(lambda number, _endpoint, _status: self._lost.append(number))
        self._wires_seen: list[str] = []
        self._is_closed = False
        self._wake_lock = threading.Lock()
        self._open_worker()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def _open_worker(self) -> None:
        ucxx = self._ucxx
        try:
            features = (ucxx.Feature.TAG, ucxx.Feature.WAKEUP)
            config = _ucx_config(self._settings)
            with without_environment(config):
                self._context = ucxx.UCXContext(config, features)
                self._worker = ucxx.UCXWorker(
                    self._context, enable_delayed_submission=False, enable_python_future=False
                )
            self._worker.init_blocking_progress_mode()
        except Exception as error:
            raise ConfigError(
                f"key 'transfer.ucx_tls' is {self._settings.tls!r}; it must be transports that "
                f"`ucx_info -d` lists on this host (devices: {self._settings.net_devices or 'all'})"
                f": {error}",
                field="transfer.ucx_tls",
                value=self._settings.tls,
                limit="transports that `ucx_info -d` lists on this host",
            ) from error
        self._context_handle = int(self._context.handle)
        self._worker_handle = int(self._worker.handle)
        self._frames = FrameReader(self._ucp, self._worker_handle)
        worker_address = bytes(self._worker.address.tobytes())
        self._address = _digest(worker_address) + worker_address
        self._control_tag = control_tag(_digest(self._address))
        self._pool_handle = 0
        if self._settings.pool_bytes:
            self._pool_handle = self._ucp.register(
                self._context_handle, self._settings.pool_address, self._settings.pool_bytes
            )

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, address: bytes) -> int:
        for peer in self._peers.values():
            if peer.address == address and not peer.is_closing:
                return peer.number
        number = next(self._numbers)
        digest, worker_address = address[:_DIGEST_BYTES], address[_DIGEST_BYTES:]
        if not worker_address or _digest(worker_address) != digest:
            self._events.append(PeerDown(number, "the address is damaged"))
            return number
        endpoint = self._ucp.open_endpoint(
            self._worker_handle, worker_address, self._on_lost, number
        )
        if endpoint < 0:
            cause = f"no connection: {self._ucp.text(endpoint)}"
            self._events.append(PeerDown(number, cause))
            return number
        self._peers[number] = _Peer(number, address, endpoint)
        return number

    def send_frame(self, peer: int, frame: bytes) -> None:
        assert len(frame) <= FRAME_BYTES_MAX, len(frame)
        known = self._open_peer(peer)
        if known is None:
            return
        buffer = (ctypes.c_char * len(frame)).from_buffer_copy(frame)
        request = self._ucp.send_bytes(known.endpoint, self._control_tag, buffer)
        self._started(_Operation(request, peer, "frame", buffer))

    def send_segment(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        known = self._open_peer(peer)
        if known is None:
            return self._ended_at_once(SegmentSent, "the peer is down")
        buffer = iov_array(regions)
        request = self._ucp.send_regions(known.endpoint, _SEGMENT | tag, buffer)
        return self._started(_Operation(request, peer, "send", buffer))

    def post_receive(self, peer: int, tag: int, regions: Sequence[Region]) -> int:
        if self._open_peer(peer) is None:
            return self._ended_at_once(SegmentReceived, "the peer is down")
        buffer = iov_array(regions)
        request = self._ucp.receive_regions(self._worker_handle, _SEGMENT | tag, buffer)
        num_bytes = sum(length for _, length in regions)
        return self._started(_Operation(request, peer, "receive", buffer, num_bytes))

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        end = time.monotonic() + timeout_s
        while True:
            is_busy = self._advance()
            if self._events:
                events = list(self._events)
                self._events.clear()
                return events
            if self._take_wake():
                return []
            left = end - time.monotonic()
            if left <= 0:
                return []
            if not is_busy and self._worker.arm():
                self._epoll.poll(min(left, _CLOSING_TICK_S) if self._is_closing() else left)

    def wake(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def close_peer(self, peer: int, cause: str) -> None:
        known = self._open_peer(peer)
        if known is not None:
            known.is_closing = True
            known.closing_request = self._ucp.close_endpoint(known.endpoint)
            known.closing_cause = cause
            known.closing_since = time.monotonic()

    def close(self) -> None:
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
        for peer in list(self._peers):
            self.close_peer(peer, "closed")
        end = time.monotonic() + self._settings.close_s_max
        while self._peers and time.monotonic() < end:
            if not self._advance():
                self._epoll.poll(_CLOSING_TICK_S)
        self._epoll.close()
        os.close(self._wake_fd)
        if self._pool_handle:
            self._ucp.unregister(self._context_handle, self._pool_handle)
        self._peers.clear()
        del self._worker, self._context

    def describe(self) -> str:
        for peer in self._peers.values():
            if not peer.is_closing:
                for wire in self._ucp.wires(peer.endpoint):
                    if wire not in self._wires_seen:
                        self._wires_seen.append(wire)
        return ",".join(self._wires_seen) or f"{self._settings.tls} (configured)"

    def _open_peer(self, peer: int) -> _Peer | None:
        known = self._peers.get(peer)
        return None if known is None or known.is_closing else known

    def _is_closing(self) -> bool:
        return any(peer.is_closing for peer in self._peers.values())

    def _started(self, operation: _Operation) -> int:
        number = next(self._numbers)
        if operation.request < 0:
            self._end(number, operation, self._ucp.text(operation.request))
            self._lost.append(operation.peer)
        else:
            self._operations[number] = operation
        return number

    def _ended_at_once(self, event: type[SegmentSent] | type[SegmentReceived], error: str) -> int:
        number = next(self._numbers)
        self._events.append(event(number, error))
        return number

    def _take_wake(self) -> bool:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return False
        return True

    def _advance(self) -> bool:
        """One bounded round of progress; True where there was any."""
        rounds = 0
        while rounds < _PROGRESS_ROUNDS_MAX and self._worker.progress_once():
            rounds += 1
        self._events.extend(self._frames.read())
        self._reap()
        while self._lost:
            self.close_peer(self._lost.popleft(), "the connection broke")
        self._reap_peers()
        return rounds > 0

    def _reap(self) -> None:
        for number, operation in list(self._operations.items()):
            status = self._ucp.status(operation.request)
            if status == IN_PROGRESS:
                continue
            error = "" if status == 0 else self._ucp.text(status)
            if operation.kind == "receive" and not error:
                _, length = self._ucp.received(operation.request)
                if length != operation.num_bytes:
                    error = f"{length} bytes arrived, {operation.num_bytes} expected"
            self._ucp.free(operation.request)
            del self._operations[number]
            self._end(number, operation, error)

    def _end(self, number: int, operation: _Operation, error: str) -> None:
        if operation.kind == "send":
            self._events.append(SegmentSent(number, error))
        elif operation.kind == "receive":
            self._events.append(SegmentReceived(number, error))

    def _reap_peers(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.is_closing]:
            has_ended = self._has_ended(peer)
            if has_ended:
                self._cancel_unmatched(peer)
            left = sum(o.peer == peer.number for o in self._operations.values())
            age_s = time.monotonic() - peer.closing_since
            if has_ended and not left:
                del self._peers[peer.number]
                self._events.append(PeerDown(peer.number, peer.closing_cause))
            elif age_s > _STUCK_FACTOR * self._settings.close_s_max:
                raise InternalError(
                    f"UCX did not end an endpoint and its {left} operations in {age_s:.1f} s"
                )

    def _has_ended(self, peer: _Peer) -> bool:
        if peer.closing_request > 0:
            if self._ucp.status(peer.closing_request) == IN_PROGRESS:
                return False
            self._ucp.free(peer.closing_request)
            peer.closing_request = 0
        return True

    def _cancel_unmatched(self, peer: _Peer) -> None:
        """A receive that outlives its endpoint was never met by a message: cancelling is safe."""
        self._reap()
        for operation in self._operations.values():
            if operation.peer != peer.number or operation.is_cancelled:
                continue
            if operation.kind == "receive":
                operation.is_cancelled = True
                self._ucp.cancel(self._worker_handle, operation.request)
        self._reap()


def _ucx_config(settings: TransportSettings) -> dict[str, str]:
    """The settings that matter, each measured; the rest is UCX's own choice."""
    config = {
        "TLS": settings.tls,
        "MM_ERROR_HANDLING": "y",
        "TCP_TX_SEG_SIZE": "64k",
        "TCP_RX_SEG_SIZE": "256k",
        "KEEPALIVE_INTERVAL": "1s",
        "RCACHE_MAX_UNRELEASED": "64m",
        "RNDV_THRESH": "8192",
        "MEMTYPE_CACHE": "n",
    }
    if settings.net_devices:
        config["NET_DEVICES"] = settings.net_devices
    return config


def _digest(data: bytes) -> bytes:
    """Guards against damage, not against malice: the data network is an isolated one."""
    return xxhash.xxh3_64_digest(data)
