"""The frontend's end of its lane: key, sockets and dispatcher as one thing.

Made new in a private folder, where the worker is told to connect (`local`), or
on the endpoints of a lane that the worker has opened.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from executor.dispatcher import Dispatcher
from executor.ipc import (
    KEY_BYTES,
    TO_PROXY,
    TO_WORKER,
    FrameOpener,
    FrameReceiver,
    FrameSealer,
    FrameSender,
    PrivateDirectory,
    bound_to,
    end_context,
    new_context,
    open_pair,
)
from executor.lane import OWNER_ID, LaneSpec
from executor.limits import ExecutorLimits
from executor.messages import ToProxy
from executor.packing import Packer
from executor.request_queue import BATCH_BYTES_MAX, RequestQueue
from executor.turns import in_turns
from protos.errors import InternalError

_TO_PROXY: Any = ToProxy


class ProxyChannel:
    """Open from construction to `close`, which is safe twice."""

    def __init__(
        self,
        spec: LaneSpec,
        limits: ExecutorLimits,
        *,
        on_messages: Callable[[list[ToProxy]], None],
        on_crash: Callable[[Exception], None],
        curve_server_key: bytes = b"",
        curve_secret_key: bytes = b"",
        directory: PrivateDirectory | None = None,
    ) -> None:
        self.spec = spec
        self._limits = limits
        self._directory = directory
        self._curve_server_key = curve_server_key
        self._curve_secret_key = curve_secret_key
        self._context = new_context()
        loop = asyncio.get_running_loop()
        requests, results = self._open(spec.requests_endpoint), self._open(spec.results_endpoint)
        if not spec.worker_binds:
            self.spec = msgspec.structs.replace(
                spec, requests_endpoint=bound_to(requests), results_endpoint=bound_to(results)
            )
        packer = Packer(limits.message_bytes_max)
        self.requests = RequestQueue(
            FrameSender(requests, FrameSealer(spec.key, TO_WORKER)),
            batch_max=limits.send_batch_max,
            batch_s=limits.send_batch_s,
            loop=loop,
            packer=packer,
            batch_bytes_max=min(BATCH_BYTES_MAX, packer.bytes_max),
        )
        self.opener: FrameOpener[ToProxy] = FrameOpener(spec.key, TO_PROXY, _TO_PROXY)
        self._dispatcher: Dispatcher[ToProxy] = Dispatcher(
            FrameReceiver(results, self.opener),
            loop,
            on_messages=self._checked(on_messages),
            on_crash=on_crash,
            in_turns=in_turns,
        )
        self._dispatcher.start()
        self._is_closed = False

    def _checked(
        self, on_messages: Callable[[list[ToProxy]], None]
    ) -> Callable[[list[ToProxy]], None]:
        """An answer that cannot be read, or never came, is lost, and its request would wait for
        ever: that is the end of this lane, told with the next message (a heartbeat at the
        latest). Frames of a lane that the worker binds are counted by its link."""

        def checked(messages: list[ToProxy]) -> None:
            num_malformed, num_lost = self.opener.num_malformed, self.opener.num_lost
            if num_malformed:
                raise InternalError(f"{num_malformed} messages of the worker cannot be read")
            if num_lost and not self.spec.worker_binds:
                raise InternalError(f"{num_lost} messages of the worker are lost")
            on_messages(messages)

        return checked

    @classmethod
    def local(
        cls,
        limits: ExecutorLimits,
        *,
        on_messages: Callable[[list[ToProxy]], None],
        on_crash: Callable[[Exception], None],
        num_buckets: int = 0,
        address: str = "",
    ) -> ProxyChannel:
        """The owner's own lane: on this host, or over tcp at `address` of it, where rank 0 may
        be on another one."""
        directory = None if address else PrivateDirectory()
        public, secret = zmq.curve_keypair() if address else (b"", b"")

        def endpoint(name: str) -> str:
            return f"tcp://{address}:*" if directory is None else directory.endpoint(name)

        spec = LaneSpec(
            frontend_id=OWNER_ID,
            key=secrets.token_bytes(KEY_BYTES),
            requests_endpoint=endpoint("requests"),
            results_endpoint=endpoint("results"),
            curve_server_key=public,
            num_buckets=num_buckets,
        )
        return cls(
            spec,
            limits,
            on_messages=on_messages,
            on_crash=on_crash,
            curve_secret_key=secret,
            directory=directory,
        )

    @property
    def num_wakes(self) -> int:
        return self._dispatcher.num_wakes

    def hold(self, is_held: bool) -> None:
        """Read no results for a while: the worker feels it by its socket's bound."""
        self._dispatcher.hold(is_held)

    def forget_files(self) -> bool:
        """Once both sockets are connected: without their files nobody else can come, and a
        SIGKILL of ours leaves nothing behind. False where they are not yet.
        """
        if not self.requests.is_connected():
            return False
        self._remove_files()
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._dispatcher.stop()
        self.requests.close()
        end_context(self._context)
        self._remove_files()

    def _remove_files(self) -> None:
        if self._directory is not None:
            self._directory.close()

    def _open(self, endpoint: str) -> zmq.Socket[bytes]:
        return open_pair(
            self._context,
            endpoint,
            is_server=not self.spec.worker_binds,
            queue_messages_max=self._limits.queue_messages_max,
            message_bytes_max=self._limits.message_bytes_max,
            linger_ms=0,
            curve_server_key=self._curve_server_key,
            curve_secret_key=self._curve_secret_key,
        )
