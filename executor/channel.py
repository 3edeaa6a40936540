"""The proxy's side of the two queues: folder, key, sockets and dispatcher as one thing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

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
    open_pair,
)
from executor.limits import ExecutorLimits
from executor.messages import ToProxy
from executor.request_queue import RequestQueue

_TO_PROXY: Any = ToProxy


class ProxyChannel:
    """Open from construction to `close`, which is safe twice and leaks rather than hangs."""

    def __init__(
        self,
        limits: ExecutorLimits,
        *,
        on_messages: Callable[[list[ToProxy]], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._limits = limits
        self._directory = PrivateDirectory()
        self.requests_endpoint = self._directory.endpoint("requests")
        self.results_endpoint = self._directory.endpoint("results")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sender = FrameSender(self._open(self.requests_endpoint), FrameSealer(self.key, TO_WORKER))
        self.requests = RequestQueue(sender)
        self.opener: FrameOpener[ToProxy] = FrameOpener(self.key, TO_PROXY, _TO_PROXY)
        self._dispatcher: Dispatcher[ToProxy] = Dispatcher(
            FrameReceiver(self._open(self.results_endpoint), self.opener),
            asyncio.get_running_loop(),
            on_messages=on_messages,
            on_crash=on_crash,
        )
        self._dispatcher.start()
        self._is_closed = False

    @property
    def num_wakes(self) -> int:
        return self._dispatcher.num_wakes

    def forget_files(self) -> bool:
        """Once both sockets are connected: without their files nobody else can come, and a
        SIGKILL of ours leaves nothing behind. False where they are not yet.
        """
        if not self.requests.is_connected():
            return False
        self._directory.close()
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.requests.close()
        self._dispatcher.stop()
        self._context.term()
        self._directory.close()

    def _open(self, endpoint: str) -> zmq.Socket[bytes]:
        return open_pair(
            self._context,
            endpoint,
            is_server=True,
            queue_messages_max=self._limits.queue_messages_max,
            message_bytes_max=self._limits.message_bytes_max,
            linger_ms=0,
        )
