"""Control calls in flight: each waits for the reply that bears its number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from executor.messages import AuditReply, CallReply, KvSnapshotReply, LoadReply, Reply, ToWorker
from executor.request_queue import RequestQueue
from protos.errors import BatonError, ServerUnavailableError, from_data

AnyReply: TypeAlias = Reply | LoadReply | AuditReply | CallReply | KvSnapshotReply


class ControlCalls:
    def __init__(self, queue: RequestQueue, timeout_s: float) -> None:
        self._queue = queue
        self._timeout_s = timeout_s
        self._last_id = 0
        self._waiting: dict[int, asyncio.Future[AnyReply]] = {}
        self.num_late = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def call(
        self, make: Callable[[int], ToWorker], timeout_s: float | None = None
    ) -> AnyReply:
        """Raises ServerUnavailableError where the worker does not take or answer it in time,
        InvalidRequestError for what cannot be sent to it, and what it answers as an error."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call_id = self.next_id()
        future: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            if not self._queue.offer(make(call_id)):
                raise ServerUnavailableError("the engine's worker does not read its queue")
            return _told(await asyncio.wait_for(future, timeout_s))
        except TimeoutError:
            raise ServerUnavailableError(
                f"the engine's worker did not answer within {timeout_s:g} s"
            ) from None
        finally:
            del self._waiting[call_id]

    def on_reply(self, reply: AnyReply) -> None:
        future = self._waiting.get(reply.call_id)
        if future is None or future.done():
            self.num_late += 1
        else:
            future.set_result(reply)

    def fail_all(self, error: BatonError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _told(reply: AnyReply) -> AnyReply:
    """An error may come in place of any answer."""
    if isinstance(reply, CallReply) and reply.error is not None:
        raise from_data(reply.error)
    return reply
