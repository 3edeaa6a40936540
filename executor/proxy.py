"""The IPC form: this process keeps the books, a worker process runs the engine.

It ties together the live requests, the control calls, the worker's life and the
channel between; each has its own file. While the worker is silent or stalled,
nothing is open and nothing is accepted; it is killed once it is given up. After
a death, and after `shutdown`, every use raises the one error that tells the
first cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from executor.channel import ProxyChannel
from executor.config import EngineConfig
from executor.control import ControlCalls
from executor.engine.seam import EngineIdentity
from executor.executor import GenerationExecutor
from executor.health import ProgressWatch
from executor.life import WorkerLife
from executor.limits import ExecutorLimits
from executor.messages import (
    AuditQuery,
    AuditReply,
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
    ToProxy,
)
from executor.request import ExecutorRequest, check_request
from executor.requests import LiveRequests
from executor.result import GenerationResult
from protos.errors import BatonError, EngineDeadError, ServerUnavailableError
from protos.messages import DisaggRequestId, LedgerAudit, Load

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
        self._limits = limits
        self._name = name
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
        self._life = WorkerLife(
            config, name=name, limits=limits, channel=self._channel, on_dead=self._on_dead
        )
        self._watch = self._new_watch()
        self._trouble: ServerUnavailableError | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._shutdown: asyncio.Task[None] | None = None

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ConfigError or EngineDeadError; everything is freed then."""
        try:
            await self._life.start(progress)
        except BaseException:
            await self.shutdown()
            raise
        self._watch = self._new_watch()  # loading took its time, and beat no heart
        self._tick()

    def _new_watch(self) -> ProgressWatch:
        limits = self._limits
        return ProgressWatch.start(limits.health, limits.heartbeat_s, self._loop.time())

    # --- use ------------------------------------------------------------------

    @property
    def identity(self) -> EngineIdentity:
        return self._life.identity

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._life.pids

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The worker's last log lines."""
        return self._life.log_lines

    def submit(self, request: ExecutorRequest) -> GenerationResult:
        self._refuse_if_over()
        check_request(request)
        try:
            return self._requests.submit(request, self._loop.time())
        except BatonError:
            self._refuse_if_over(looks_now=True)  # a dead worker's queue looks full
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
        return LedgerAudit(
            entries_by_state=self._requests.ledger.entries_by_state(),
            blocks_by_state=engine.blocks_by_state,
            blocks_by_owner=engine.blocks_by_owner,
            holders=engine.holders,
            counters={
                **_prefixed("proxy", self._counters()),
                **_prefixed("worker", reply.worker),
                **_prefixed("engine", {**engine.sequences_by_state, **engine.counters}),
            },
        )

    def _counters(self) -> dict[str, int]:
        return {
            **self._requests.ledger.counters(),
            "dropped_tokens": self._requests.num_dropped_tokens,
            "bad_frames": self._channel.opener.num_bad,
            "late_replies": self._calls.num_late,
            "wakes": self._channel.num_wakes,
        }

    # --- health ---------------------------------------------------------------

    def check_health(self) -> None:
        self._refuse_if_over(looks_now=True)

    async def wait_dead(self) -> EngineDeadError:
        return await asyncio.shield(self._life.dead)

    def _refuse_if_over(self, *, looks_now: bool = False) -> None:
        """Raises EngineDeadError after a death, ServerUnavailableError while closing
        and while the worker is in trouble."""
        if self._life.dead.done():
            raise self._life.dead.result()
        if self._is_closing:
            raise ServerUnavailableError("the engine is shutting down")
        if self._life.is_suspect or (looks_now and self._life.has_exited()):
            raise EngineDeadError("the engine's worker has just died; the cause is being read")
        self._look_at_worker()
        if self._trouble is not None:
            raise self._trouble

    def _look_at_worker(self) -> None:
        """What is open ends with the first sign of trouble, and the worker is told so: if it
        goes on, it frees everything by itself before it sees a new request."""
        if self._is_closing or self._life.dead.done() or not self._life.is_loaded:
            return
        now_s = self._loop.time()
        what = self._watch.look(now_s)
        if not what:
            if self._trouble is not None:
                logger.warning("%s: the engine's worker is back", self._name)
            self._trouble = None
            return
        pids = ", ".join(str(pid) for pid in self._life.pids)
        is_first = self._trouble is None
        self._trouble = ServerUnavailableError(
            f"the engine's worker of {self._name} (process {pids}) {what}"
        )
        if is_first:
            logger.error("%s; %d requests fail", self._trouble.message, len(self._requests))
            self._requests.fail_all(self._trouble, cancel=True)
            self._calls.fail_all(self._trouble)
        if self._watch.is_given_up(now_s):
            bound = f"health.give_up_ms is {self._limits.health.give_up_s * 1000:g}"
            self._life.give_up(f"it {what}, and was killed ({bound})")

    def _on_dead(self, error: EngineDeadError) -> None:
        """Everything open hears of it now."""
        self._requests.fail_all(error, cancel=False)
        self._calls.fail_all(error)

    def _tick(self) -> None:
        self._look_at_worker()
        self._requests.expire(self._loop.time())
        self._channel.requests.flush()
        self._tick_timer = self._loop.call_later(self._limits.heartbeat_s, self._tick)

    # --- what comes from the worker -------------------------------------------

    def _on_messages(self, messages: list[ToProxy]) -> None:
        self._watch.on_heard(self._loop.time())
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
                self._life.on_hello(message)
            case Ready():
                self._life.on_ready(message.identity)
            case Died():
                self._life.on_died(message.error)
            case _:
                assert_never(message)

    def _on_dispatcher_crash(self, error: Exception) -> None:
        self._life.declare_dead(f"reading its results failed: {type(error).__name__}: {error}")

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
        self._requests.fail_all(error, cancel=not self._life.dead.done())
        self._calls.fail_all(error)

    async def shutdown(self) -> None:
        if self._shutdown is None:
            self._shutdown = self._loop.create_task(self._shut_down())
        await asyncio.shield(self._shutdown)

    async def _shut_down(self) -> None:
        self._close_intake()
        await self._life.stop()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._channel.close()


def _prefixed(prefix: str, counters: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}_{name}": value for name, value in counters.items()}
