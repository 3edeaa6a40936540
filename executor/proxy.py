"""The executor's books in the process that serves; the engine is behind a link.

It ties together the live requests, the control calls, the health watch and the
link, which is what the forms differ in. While the worker is silent or stalled,
nothing is open and nothing is accepted; it is given up after a while. After a
death, and after `shutdown`, every use raises the one error that tells the first
cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from executor import exact
from executor.control import ControlCalls
from executor.engine.control_seam import IterationStats, KvEvent, KvSnapshot
from executor.engine.seam import EngineIdentity
from executor.executor import GenerationExecutor
from executor.health import ProgressWatch
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from executor.messages import (
    AuditQuery,
    AuditReply,
    Beat,
    Call,
    CallReply,
    CancelNamed,
    Died,
    Heartbeat,
    KvSnapshotQuery,
    KvSnapshotReply,
    LaneClosed,
    LoadQuery,
    LoadReply,
    Observed,
    Outputs,
    Ready,
    Release,
    Renew,
    Reply,
    ToProxy,
)
from executor.queue_watch import QueueWatch
from executor.request import ExecutorRequest, admit_request
from executor.requests import LiveRequests
from executor.result import GenerationResult
from executor.subscriptions import Subscription, Subscriptions
from protos.errors import (
    BatonError,
    EngineDeadError,
    ServerUnavailableError,
)
from protos.messages import DisaggRequestId, LedgerAudit, Load

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer
    from executor.post.start import MakePost

logger = logging.getLogger(__name__)


class Proxy(GenerationExecutor):
    """See the module's docstring; construct on the event loop, then `start`."""

    def __init__(
        self,
        make_link: Callable[[LinkUser], Link],
        *,
        tokenizer: Tokenizer | None,
        limits: ExecutorLimits,
        make_post: MakePost | None = None,
    ) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._link = make_link(self)
        self._post = None if make_post is None else make_post(on_pressure=self._link.hold)
        self._requests = LiveRequests(
            self._link.requests,
            tokenizer,
            frontend_id=self._link.frontend_id,
            tombstones_max=limits.tombstones_max,
            grace_s=limits.deadline_grace_s,
            post=self._post,
        )
        self._calls = ControlCalls(self._link.requests, limits.call_s_max)
        self._subscriptions = Subscriptions(self._link.requests.put)
        self._watch = self._new_watch()
        self._queue_watch = QueueWatch(limits.health, limits.heartbeat_s, self._loop.time())
        self._trouble: ServerUnavailableError | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._is_asleep = False
        self._is_closing = False
        self._is_intake_closed = False
        self._shutdown: asyncio.Task[None] | None = None

    async def start(self, progress: Callable[[str], None]) -> None:
        """Raises ConfigError or EngineDeadError; everything is freed then."""
        try:
            if self._post is not None:
                await self._post.start(self._requests)
                progress(f"{self._post.num_buckets} postprocess workers are up")
            await self._link.start(progress)
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
    def form(self) -> str:
        return self._link.form

    @property
    def identity(self) -> EngineIdentity:
        return self._link.identity

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._link.pids

    @property
    def post_pids(self) -> tuple[int, ...]:
        """The postprocess workers of this frontend."""
        return () if self._post is None else self._post.pids

    @property
    def log_lines(self) -> tuple[str, ...]:
        return self._link.log_lines

    def submit(self, request: ExecutorRequest) -> GenerationResult:
        self._refuse_if_over()
        request = admit_request(request, self.identity.model_info.limits, self.form)
        try:
            return self._requests.submit(request, self._loop.time())
        except BatonError:
            self._refuse_if_over(looks_now=True)  # a dead worker's queue looks full
            raise

    def abort_request(self, client_id: int) -> None:
        self._requests.cancel(client_id)

    def find(self, external_id: str) -> int | None:
        return self._requests.ledger.find(external_id)

    async def abort_named(self, external_id: str) -> bool:
        external_id = exact.text("external_id", external_id, exact.TEXT_LENGTH_MAX)
        client_id = self.find(external_id)
        if client_id is not None:
            self.abort_request(client_id)
            return True
        if not self._link.shares_engine:
            return False
        self._refuse_if_over()
        reply = await self._calls.call(lambda call: CancelNamed(call, external_id))
        assert isinstance(reply, Reply)
        return reply.value

    async def release(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        self._refuse_if_over()
        lease = exact.disagg_id(disagg_id), exact.data("pull_token", pull_token)
        reply = await self._calls.call(lambda call: Release(call, *lease))
        assert isinstance(reply, Reply)
        return reply.value

    async def renew(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        self._refuse_if_over()
        lease = exact.disagg_id(disagg_id), exact.data("pull_token", pull_token)
        reply = await self._calls.call(lambda call: Renew(call, *lease))
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
        if self._post is not None:
            self._post.check()
        engine = reply.audit
        return LedgerAudit(
            entries_by_state=self._requests.ledger.entries_by_state(),
            blocks_by_state=engine.blocks_by_state,
            blocks_by_owner=engine.blocks_by_owner,
            holders=engine.holders,
            counters={
                **_prefixed("proxy", self._counters()),
                **_prefixed("worker", reply.worker),
                **_prefixed("post", {} if self._post is None else self._post.counters()),
                **_prefixed("engine", {**engine.sequences_by_state, **engine.counters}),
            },
        )

    # --- control --------------------------------------------------------------

    async def collective_rpc(self, method: str, **arguments: Any) -> tuple[Any, ...]:
        self._refuse_if_over()
        method = exact.text("method", method, exact.TEXT_LENGTH_MAX)
        packed = exact.arguments(method, arguments)
        reply = await self._calls.call(
            lambda call: Call(call, method, packed), self._limits.control_s_max
        )
        assert isinstance(reply, CallReply)
        if method in ("sleep", "wake_up"):
            self._is_asleep = method == "sleep"  # ahead of the heartbeat that tells others
        return tuple(msgspec.msgpack.decode(value) for value in reply.values)

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    def subscribe_stats(self) -> Subscription[IterationStats]:
        self._refuse_if_over()
        return self._subscriptions.to_stats()

    def subscribe_kv_events(self) -> Subscription[KvEvent]:
        self._refuse_if_over()
        return self._subscriptions.to_kv_events()

    async def kv_snapshot(self) -> KvSnapshot:
        self._refuse_if_over()
        reply = await self._calls.call(KvSnapshotQuery)
        assert isinstance(reply, KvSnapshotReply)
        return reply.snapshot

    def _counters(self) -> dict[str, int]:
        return {
            **self._requests.ledger.counters(),
            "dropped_tokens": self._requests.num_dropped_tokens,
            "logits_bytes": self._requests.num_logits_bytes,
            "wakes_elsewhere": self._requests.home.num_calls_elsewhere,
            "late_replies": self._calls.num_late,
            **self._link.counters(),
        }

    # --- health ---------------------------------------------------------------

    def check_health(self) -> None:
        self._refuse_if_over(looks_now=True)

    async def wait_dead(self) -> EngineDeadError:
        return await asyncio.shield(self._link.dead)

    def _refuse_if_over(self, *, looks_now: bool = False) -> None:
        """Raises EngineDeadError after a death, ServerUnavailableError while closing
        and while the worker is in trouble."""
        if self._link.dead.done():
            raise self._link.dead.result()
        if self._is_closing:
            raise ServerUnavailableError("the engine is shutting down")
        if self._link.is_suspect or (looks_now and self._link.has_exited()):
            raise EngineDeadError("the engine's worker has just died; the cause is being read")
        self._look_at_worker()
        if self._trouble is not None:
            raise self._trouble

    def _look_at_worker(self) -> None:
        """What is open ends with the first sign of trouble, and the worker is told so: if it
        goes on, it frees everything by itself before it sees a new request."""
        if self._is_closing or self._link.dead.done() or not self._link.is_loaded:
            return
        now_s = self._loop.time()
        what = self._watch.look(now_s) or self._look_at_queue(now_s) or self._link.trouble
        if not what:
            if self._trouble is not None:
                logger.warning("%s: the engine's worker is back", self._link.name)
            self._trouble = None
            return
        if self._trouble is None:
            self._begin_trouble(what)
        if self._watch.is_given_up(now_s) or self._queue_watch.is_given_up:
            bound = f"health.give_up_ms is {self._limits.health.give_up_s * 1000:g}"
            self._link.give_up(f"it {what}, and {self._link.fate} ({bound})")

    def _look_at_queue(self, now_s: float) -> str:
        """Trouble is over as soon as there is room, not a tick later."""
        if self._queue_watch.look():
            self._link.requests.flush()
            self._queue_watch.on_tick(now_s, is_stuck=self._link.requests.is_stuck)
        return self._queue_watch.look()

    def _begin_trouble(self, what: str) -> None:
        pids = ", ".join(str(pid) for pid in self._link.pids)
        where = f" (process {pids})" if pids else ""
        error = ServerUnavailableError(f"the engine's worker of {self._link.name}{where} {what}")
        self._trouble = error
        logger.error("%s; %d requests fail", error.message, len(self._requests))
        self._requests.fail_all(error, cancel=True)
        self._calls.fail_all(error)

    def on_dead(self, error: EngineDeadError) -> None:
        """Everything open hears of it now."""
        self._end_open(error, cancel=False)

    def _end_open(self, error: ServerUnavailableError, *, cancel: bool) -> None:
        """It never raises: a defect in one keeps neither the others nor a link's end waiting. It
        is told as any other that nobody catches."""
        tells: list[Callable[[], None]] = [
            lambda: self._requests.fail_all(error, cancel=cancel),
            lambda: self._calls.fail_all(error),
            lambda: self._subscriptions.fail_all(error),
        ]
        for tell in tells:
            try:
                tell()
            except Exception as defect:
                what = f"{self._link.name}: not all that was open hears of its end"
                self._loop.call_exception_handler({"message": what, "exception": defect})

    def _tick(self) -> None:
        """The next one first: deadlines and the watch must outlive whatever this one meets."""
        self._tick_timer = self._loop.call_later(self._limits.heartbeat_s, self._tick)
        queue, now_s = self._link.requests, self._loop.time()
        self._requests.expire(now_s)
        self._look_at_worker()
        queue.flush()
        if self._link.must_beat:
            queue.offer(Beat())  # without room the worker has enough to hear
        # the loop may be within a call of ours for long, and reads nothing meanwhile
        is_stuck = queue.is_stuck and not self._calls.is_waiting
        self._queue_watch.on_tick(now_s, is_stuck=is_stuck)

    # --- what comes from the worker -------------------------------------------

    def on_messages(self, messages: list[ToProxy]) -> None:
        self._watch.on_heard(self._loop.time())
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: ToProxy) -> None:
        match message:
            case Outputs():
                for client_id in message.accepted:
                    self._requests.on_accepted(client_id)
                self._watch.on_outputs()
                self._requests.on_outputs(message.outputs)
                if message.buckets and self._post is not None:
                    self._post.forward(message.buckets)
            case Heartbeat():
                now_s = self._loop.time()
                self._watch.on_heartbeat(now_s, message.progress, message.is_busy)
                self._queue_watch.is_busy = message.is_busy
                self._is_asleep = message.is_asleep
            case Reply() | LoadReply() | AuditReply() | CallReply() | KvSnapshotReply():
                self._calls.on_reply(message)
            case Observed():
                self._subscriptions.on_observed(message)
            case _:
                self._on_fate(message)

    def _on_fate(self, message: Ready | LaneClosed | Died) -> None:
        match message:
            case Ready():
                self._link.on_ready(message.identity)
            case LaneClosed():
                self._link.on_lane_closed(message.why)
            case Died():
                self._link.on_died(message.error)
            case _:
                assert_never(message)

    # --- shutdown -------------------------------------------------------------

    def pre_shutdown(self) -> None:
        """What is open is ended in a turn of the loop of its own: a signal handler may ask for
        it in the midst of anything."""
        self._is_closing = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._close_intake)

    def _close_intake(self) -> None:
        self._is_closing = True
        if self._is_intake_closed:
            return
        self._is_intake_closed = True
        error = ServerUnavailableError("the engine is shutting down")
        self._end_open(error, cancel=not self._link.dead.done())

    async def shutdown(self) -> None:
        if self._shutdown is None:
            self._shutdown = self._loop.create_task(self._shut_down())
            self._shutdown.add_done_callback(self._on_shut_down)
        await asyncio.shield(self._shutdown)

    async def _shut_down(self) -> None:
        """Every part is ended, also behind one that fails to; it never raises."""
        is_well = self._trouble is None and not self._link.dead.done()
        self._close_intake()
        try:
            for leak in await self._link.stop(is_well=is_well):
                logger.error("%s: left behind: %s", self._link.name, leak)
        except Exception:
            logger.exception("%s: left behind: its end failed", self._link.name)
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if self._post is not None:
            try:
                await self._post.stop()
            except Exception:
                logger.exception("%s: its postprocess workers' end failed", self._link.name)

    def _on_shut_down(self, shutdown: asyncio.Task[None]) -> None:
        """Cancelled by whoever ends the loop (asyncio.run cancels all), maybe before it began:
        there are no more turns to wait in, so what is ours is cut off now."""
        if not shutdown.cancelled():
            return
        self._close_intake()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        for cut in (self._link.cut, *(() if self._post is None else (self._post.cut,))):
            try:
                cut()
            except Exception:
                logger.exception("%s: left behind: its end failed", self._link.name)


def _prefixed(prefix: str, counters: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}_{name}": value for name, value in counters.items()}
