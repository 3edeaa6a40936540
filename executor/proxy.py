"""The IPC form: this process keeps the books, a worker process runs the engine.

Life: `start` (spawn, HELLO, READY), serving, then one of two ends. `shutdown`:
requests fail, the stop sentinel goes out, the worker's exit is awaited within a
bound, everything is freed. Death: seen by the process monitor, or said by the
worker itself; after a moment in which its last words are read, the cause is
declared once, and every open and later use fails with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, assert_never

from executor.channel import ProxyChannel
from executor.child import WorkerChild
from executor.config import EngineConfig
from executor.control import ControlCalls
from executor.engine.seam import EngineIdentity
from executor.executor import GenerationExecutor
from executor.health import ProgressWatch
from executor.limits import ExecutorLimits
from executor.messages import (
    AuditQuery,
    AuditReply,
    Bootstrap,
    Died,
    Heartbeat,
    Hello,
    LoadQuery,
    LoadReply,
    Outputs,
    Ready,
    Release,
    Renew,
    Reply,
    Stop,
    ToProxy,
    pack_bootstrap,
)
from executor.request import ExecutorRequest, check_request
from executor.requests import LiveRequests
from executor.result import GenerationResult
from protos.errors import (
    BatonError,
    ConfigError,
    EngineDeadError,
    ErrorData,
    ServerUnavailableError,
    from_data,
)
from protos.messages import DisaggRequestId, LedgerAudit, Load

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
LINES_IN_MESSAGE_MAX = 8


class IpcProxy(GenerationExecutor):
    """See the module's docstring; construct on the event loop, then `start`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        tokenizer: Tokenizer | None,
        limits: ExecutorLimits,
    ) -> None:
        self._config = config
        self._name = name
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._channel = ProxyChannel(
            limits, on_messages=self._on_messages, on_crash=self._on_dispatcher_crash
        )
        self._requests = LiveRequests(
            self._channel.requests,
            tokenizer,
            tombstones_max=limits.tombstones_max,
            grace_s=limits.deadline_grace_s,
        )
        self._calls = ControlCalls(self._channel.requests, limits.call_s_max)
        self._child: WorkerChild | None = None
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._ready: asyncio.Future[EngineIdentity] = self._loop.create_future()
        self._dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._last_words: ErrorData | None = None
        self._watch = ProgressWatch.start(limits.stall_s, self._loop.time())
        self._tick_timer: asyncio.TimerHandle | None = None
        self._death_timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._shutdown: asyncio.Task[None] | None = None

    # --- start ----------------------------------------------------------------

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ConfigError or EngineDeadError; everything is freed then."""
        try:
            await self._start(progress)
        except BaseException:
            await self.shutdown()
            raise

    async def _start(self, progress: Callable[[str], None]) -> None:
        limits = self._limits
        started_at_s = self._loop.time()
        self._child = WorkerChild(
            pack_bootstrap(self._bootstrap()),
            name=self._name,
            limits=limits,
            on_exit=self._on_exit,
        )
        hello = await self._within(self._hello, limits.hello_s_max, "start")
        progress(f"engine worker {hello.pid} is up; loading {self._config.model or 'the model'}")
        await self._within(self._ready, limits.load_s_max, "load its model")
        took_s = self._loop.time() - started_at_s
        logger.info("%s: engine worker %d is ready after %.1f s", self._name, hello.pid, took_s)
        progress(f"engine ready after {took_s:.1f} s")
        self._watch = ProgressWatch.start(limits.stall_s, self._loop.time())
        self._tick()

    def _bootstrap(self) -> Bootstrap:
        limits = self._limits
        return Bootstrap(
            config=self._config,
            name=self._name,
            key=self._channel.key,
            requests_endpoint=self._channel.requests_endpoint,
            results_endpoint=self._channel.results_endpoint,
            heartbeat_s=limits.heartbeat_s,
            queue_messages_max=limits.queue_messages_max,
            message_bytes_max=limits.message_bytes_max,
            tombstones_max=limits.tombstones_max,
            parent_pid=os.getpid(),
            dies_with_parent_thread=threading.current_thread() is threading.main_thread(),
        )

    async def _within(self, future: asyncio.Future[T], timeout_s: float, what: str) -> T:
        """The future's value, unless the worker dies first or time runs out."""
        await asyncio.wait(
            (future, self._dead), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if future.done():
            return future.result()
        if self._dead.done():
            raise self._start_error()
        raise EngineDeadError(f"the engine's worker did not {what} within {timeout_s:g} s")

    def _start_error(self) -> BatonError:
        words = self._last_words
        if words is not None and words.kind == ConfigError.__name__:
            return from_data(words)
        return self._dead.result()

    # --- use ------------------------------------------------------------------

    @property
    def identity(self) -> EngineIdentity:
        return self._ready.result()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return () if self._child is None or self._child.exited.is_set() else (self._child.pid,)

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The worker's last log lines."""
        return () if self._child is None else self._child.log_lines

    def submit(self, request: ExecutorRequest) -> GenerationResult:
        self._refuse_if_over()
        check_request(request)
        try:
            return self._requests.submit(request, self._loop.time())
        except BatonError:
            self._refuse_if_over(looks_now=True)  # its queue is full for ever where it is dead
            raise

    def abort_request(self, client_id: int) -> None:
        self._requests.cancel(client_id)

    def find(self, external_id: str) -> int | None:
        return self._requests.ledger.find(external_id)

    async def release(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        self._refuse_if_over()
        reply = await self._calls.call(lambda call: Release(call, disagg_id, pull_token))
        assert isinstance(reply, Reply)
        return reply.value

    async def renew(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        self._refuse_if_over()
        reply = await self._calls.call(lambda call: Renew(call, disagg_id, pull_token))
        assert isinstance(reply, Reply)
        return reply.value

    async def load(self) -> Load:
        self._refuse_if_over()
        reply = await self._calls.call(LoadQuery)
        assert isinstance(reply, LoadReply)
        return reply.load

    async def audit(self) -> LedgerAudit:
        self._refuse_if_over()
        reply = await self._calls.call(AuditQuery)
        assert isinstance(reply, AuditReply)
        self._requests.check()
        engine = reply.audit
        counters = {
            **_prefixed("proxy", self._counters()),
            **_prefixed("worker", reply.worker),
            **_prefixed("engine", {**engine.sequences_by_state, **engine.counters}),
        }
        return LedgerAudit(
            entries_by_state=self._requests.ledger.entries_by_state(),
            blocks_by_state=engine.blocks_by_state,
            blocks_by_owner=engine.blocks_by_owner,
            holders=engine.holders,
            counters=counters,
        )

    def _counters(self) -> dict[str, int]:
        return {
            **self._requests.ledger.counters(),
            "dropped_tokens": self._requests.num_dropped_tokens,
            "bad_frames": self._channel.opener.num_bad,
            "late_replies": self._calls.num_late,
            "wakes": self._channel.num_wakes,
        }

    def check_health(self) -> None:
        self._refuse_if_over(looks_now=True)
        trouble = self._watch.trouble(self._loop.time())
        if trouble:
            raise EngineDeadError(trouble)

    async def wait_dead(self) -> EngineDeadError:
        return await asyncio.shield(self._dead)

    def _refuse_if_over(self, *, looks_now: bool = False) -> None:
        """Raises EngineDeadError after a death, ServerUnavailableError while closing."""
        if self._dead.done():
            raise self._dead.result()
        if self._is_closing:
            raise ServerUnavailableError("the engine is shutting down")
        is_gone = looks_now and self._child is not None and self._child.has_exited()
        if is_gone or self._death_timer is not None:
            raise EngineDeadError("the engine's worker has just died; the cause is being read")

    # --- what comes from the worker -------------------------------------------

    def _on_messages(self, messages: list[ToProxy]) -> None:
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: ToProxy) -> None:
        match message:
            case Outputs():
                for client_id in message.accepted:
                    self._requests.on_accepted(client_id)
                for output in message.outputs:
                    self._requests.on_output(output)
            case Heartbeat():
                now_s = self._loop.time()
                self._watch.on_heartbeat(now_s, message.progress, message.is_busy)
            case Reply() | LoadReply() | AuditReply():
                self._calls.on_reply(message)
            case Hello():
                _settle(self._hello, message)
            case Ready():
                _settle(self._ready, message.identity)
            case Died():
                self._last_words = self._last_words or message.error
                self._suspect_death()
            case _:
                assert_never(message)

    def _on_dispatcher_crash(self, error: Exception) -> None:
        self._declare_dead(f"reading its results failed: {type(error).__name__}: {error}")

    def _tick(self) -> None:
        self._requests.expire(self._loop.time())
        self._channel.requests.flush()
        self._tick_timer = self._loop.call_later(self._limits.heartbeat_s, self._tick)

    # --- death ----------------------------------------------------------------

    def _on_exit(self) -> None:
        """Detection. While we close, an exit is what we wait for."""
        if not self._is_closing or not self._ready.done():
            self._suspect_death()

    def _suspect_death(self) -> None:
        """From now on nothing is accepted; what is already on its way is still read."""
        if self._death_timer is None and not self._dead.done():
            self._death_timer = self._loop.call_later(self._limits.last_words_s, self._handle_death)

    def _handle_death(self) -> None:
        assert self._child is not None
        parts = []
        if self._last_words is not None:
            parts.append(f"{self._last_words.kind}: {self._last_words.message}")
        if self._child.has_exited():
            parts.append(self._child.describe_exit())
        lines = self._child.log_lines[-LINES_IN_MESSAGE_MAX:]
        if lines:
            parts.append("its last log lines:\n  " + "\n  ".join(lines))
        self._declare_dead("; ".join(parts))

    def _declare_dead(self, cause: str) -> None:
        """First cause wins; everything open hears of it now."""
        if self._dead.done():
            return
        error = EngineDeadError(f"the engine of {self._name} is dead: {cause}")
        if not self._is_closing:
            logger.error("%s", error.message)
        self._dead.set_result(error)
        self._requests.fail_all(error, cancel=False)
        self._calls.fail_all(error)

    # --- shutdown -------------------------------------------------------------

    def pre_shutdown(self) -> None:
        try:
            is_on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_on_loop = False
        if is_on_loop:
            self._close_intake()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_intake)

    def _close_intake(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        error = ServerUnavailableError("the engine is shutting down")
        self._requests.fail_all(error, cancel=not self._dead.done())
        self._calls.fail_all(error)

    async def shutdown(self) -> None:
        if self._shutdown is None:
            self._shutdown = self._loop.create_task(self._shut_down())
        await asyncio.shield(self._shutdown)

    async def _shut_down(self) -> None:
        self._close_intake()
        if self._child is not None:
            await self._stop_child(self._child)
            self._child.close()
        for timer in (self._tick_timer, self._death_timer):
            if timer is not None:
                timer.cancel()
        self._channel.close()
        self._declare_dead("it was shut down")

    async def _stop_child(self, child: WorkerChild) -> None:
        """The sentinel first; SIGKILL where there is no loop to read it, or not in time."""
        if self._ready.done() and not self._dead.done():
            self._channel.requests.put(Stop())
            if await _wait_for(child.exited, self._limits.stop_s_max):
                return
            logger.warning(
                "%s: the engine's worker %d did not stop within %g s and is killed",
                self._name,
                child.pid,
                self._limits.stop_s_max,
            )
        child.kill()
        if not await _wait_for(child.exited, self._limits.stop_s_max):
            logger.error("%s: the engine's worker %d does not end: it leaks", self._name, child.pid)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _prefixed(prefix: str, counters: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}_{name}": value for name, value in counters.items()}
