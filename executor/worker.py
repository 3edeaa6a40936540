"""The worker's loop: it alone drives the engine.

Life: the engine is loaded, every lane is greeted with READY, then rounds of
drain the inbox, step, send each lane what the step said about its requests as
one message, sleep where there is nothing to do. It ends by the owner's `Stop`
(cleanly), or by an exception of the engine, which is dead then.

A lane may speak of its own requests only; one that ends takes its requests with
it. Around the loop stand the receiving thread, the heart, and what every rank
has (executor/world/rank.py).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from executor.config import EngineConfig
from executor.control_desk import ControlDesk, Members
from executor.engine.seam import Engine, EngineOutput
from executor.inbox import Inbox, LaneEnded
from executor.lane import OWNER_ID
from executor.ledger import Adoption, Event, Ledger, Outcome, frontend_of
from executor.messages import (
    AuditQuery,
    AuditReply,
    Beat,
    Call,
    Cancel,
    CancelNamed,
    Heartbeat,
    KvSnapshotQuery,
    KvSnapshotReply,
    Listen,
    LoadQuery,
    LoadReply,
    Observed,
    Outputs,
    Ready,
    Release,
    Renew,
    Reply,
    Stop,
    Submit,
    ToProxy,
    ToWorker,
)
from executor.names import Names
from protos.errors import (
    BatonError,
    DuplicateRequestError,
    ErrorData,
    RequestCancelledError,
    Severity,
)

logger = logging.getLogger(__name__)

_TOKENS, _APPLIED = Event.TOKENS, Outcome.APPLIED
"""Asked once per token: looking an enum's member up is slow before Python 3.12."""
CreateEngine = Callable[[EngineConfig, Callable[[], None]], Engine]
FLUSH_S = 0.01
"""How soon the idle loop tries again where a frontend had no room."""


class Answers(Protocol):
    """Where the loop's answers go: lanes over sockets, or within this process."""

    def greet(self, greeting: Ready) -> None: ...

    def say(self, frontend_id: int, message: ToProxy) -> bool:
        """False where the loop should end instead."""

    def flush(self) -> bool:
        """True where nothing waits for room."""

    @property
    def num_bad_frames(self) -> int: ...

    @property
    def num_unsaid(self) -> int: ...


class Beats(Protocol):
    def beat(self, heartbeat: Heartbeat) -> None: ...


class Heart(threading.Thread):
    """Reports the loop's progress, from outside the loop, so that a stuck one shows."""

    def __init__(self, worker: Worker, answers: Beats, period_s: float) -> None:
        super().__init__(name="heart", daemon=True)
        self._worker = worker
        self._answers = answers
        self._period_s = period_s
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self._answers.beat(self._worker.heartbeat())

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class Worker:
    """The loop, its ledger and the names of its requests."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        answers: Answers,
        *,
        tombstones_max: int,
        members: Members | None = None,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._answers = answers
        self._ledger = Ledger(tombstones_max=tombstones_max)
        self._names = Names()
        self._desk = ControlDesk(
            engine.control, answers.say, members, wake=inbox.wake, in_words=self._names.in_words
        )
        self._listeners: dict[int, Listen] = {}
        self._progress = 0
        self._num_beats_in_calls = 0
        self._is_busy = False
        self._is_stopped = False
        self._accepted: list[int] = []
        self._refused: list[EngineOutput] = []
        self._ended_lanes: dict[int, None] = {}

    def heartbeat(self) -> Heartbeat:
        """`progress` takes in what the engine does within a step: a large model's step is long.
        A control call may take longer than any step, so it counts as progress while it may."""
        self._num_beats_in_calls += self._desk.is_at_work
        progress = self._progress + self._num_beats_in_calls + self._engine.progress
        return Heartbeat(progress, self._is_busy, self._engine.control.is_asleep)

    def run(self) -> None:
        """Until the owner's `Stop`. Raises what the engine raised: it is dead then."""
        self._answers.greet(Ready(self._engine.identity))
        while not self._is_stopped:
            self._round()
        self._desk.close()

    def _round(self) -> None:
        letters = self._inbox.take(self._wait_s())
        self._is_busy = True
        self._progress += 1
        self._desk.turn()
        for frontend_id, message in letters:
            # else read while the lane was being closed; the end of all needs no lane
            if frontend_id not in self._ended_lanes or isinstance(message, Stop):
                self._handle(frontend_id, message)
        if not self._is_stopped:
            self._report(self._engine.step())
            if self._listeners:
                self._tell_listeners()
        self._is_busy = False

    def _wait_s(self) -> float | None:
        has_room = self._answers.flush()  # at work too: whoever has read waits for the rest
        if self._engine.has_work():
            return 0
        wait_s = self._engine.next_deadline_s()
        if has_room:
            return wait_s
        return FLUSH_S if wait_s is None else min(wait_s, FLUSH_S)

    def _handle(self, frontend_id: int, message: ToWorker | LaneEnded) -> None:
        match message:
            case Submit():
                if self._ledger.is_of_lane(message.request.request_id, frontend_id):
                    self._submit(message)
            case Cancel():
                if self._ledger.is_of_lane(message.client_id, frontend_id):
                    self._cancel(message.client_id)
            case Call():
                self._desk.begin(frontend_id, message)
            case Listen():
                self._listen(frontend_id, message)
            case LaneEnded():
                self._end_lane(frontend_id)
            case Beat():
                pass  # it was heard: that was all
            case Stop():
                self._is_stopped = self._is_stopped or frontend_id == OWNER_ID
            case _:
                self._answers.say(frontend_id, self._answer(message))

    def _answer(
        self, message: CancelNamed | Release | Renew | LoadQuery | AuditQuery | KvSnapshotQuery
    ) -> Reply | LoadReply | AuditReply | KvSnapshotReply:
        match message:
            case CancelNamed():
                return Reply(message.call_id, self._cancel_named(message.external_id))
            case Release():
                done = self._engine.release(message.disagg_request_id, message.pull_token)
                return Reply(message.call_id, done)
            case Renew():
                done = self._engine.renew(message.disagg_request_id, message.pull_token)
                return Reply(message.call_id, done)
            case LoadQuery():
                return LoadReply(message.call_id, self._engine.load())
            case AuditQuery():
                return self._audit(message.call_id)
            case KvSnapshotQuery():
                return KvSnapshotReply(message.call_id, self._engine.control.kv_snapshot())

    # --- requests -------------------------------------------------------------

    def _submit(self, message: Submit) -> None:
        client_id = message.request.request_id
        adoption = self._ledger.adopt(client_id)
        if adoption is Adoption.REFUSED:
            self._refuse(
                client_id, RequestCancelledError("the request was cancelled before it came")
            )
        if adoption is not Adoption.NEW:
            return
        try:
            self._take_name(message.external_id, client_id)
            self._engine.submit(message.request)
        except BatonError as error:
            if error.severity is not Severity.REQUEST:
                raise
            self._names.give_back(client_id)
            self._ledger.apply(client_id, Event.FAIL)
            self._refuse(client_id, error)
            return
        self._ledger.apply(client_id, Event.SEND)
        self._ledger.apply(client_id, Event.ACCEPT)
        self._accepted.append(client_id)

    def _take_name(self, external_id: str, client_id: int) -> None:
        if not self._names.take(external_id, client_id):
            raise DuplicateRequestError(
                f"a request with external_id {external_id!r} is already running here",
                field="external_id",
                value=external_id,
                limit="unique among the requests that are running",
            )

    def _refuse(self, client_id: int, error: BatonError) -> None:
        self._refused.append(EngineOutput(request_id=client_id, error=error.to_data()))

    def _cancel(self, client_id: int) -> None:
        match self._ledger.apply(client_id, Event.CANCEL):
            case Outcome.APPLIED:
                self._engine.abort(client_id)
            case Outcome.UNKNOWN:
                self._ledger.refuse(client_id)
            case Outcome.LATE:
                pass

    def _cancel_named(self, external_id: str) -> bool:
        client_id = self._names.find(external_id)
        if client_id is None:
            return False
        self._cancel(client_id)
        return True

    def _end_lane(self, frontend_id: int) -> None:
        """What it asked for is aborted; what still ends for it has no reader."""
        self._ended_lanes[frontend_id] = None
        self._listen(frontend_id, Listen(stats=False, kv_events=False))
        for client_id in self._ledger.live_of(frontend_id):
            self._cancel(client_id)

    # --- listeners ------------------------------------------------------------

    def _listen(self, frontend_id: int, wanted: Listen) -> None:
        """The engine is told what anybody wants; nothing is built for nobody."""
        self._listeners.pop(frontend_id, None)
        if wanted.stats or wanted.kv_events:
            self._listeners[frontend_id] = wanted
        wishes = self._listeners.values()
        self._engine.control.listen(
            stats=any(wish.stats for wish in wishes),
            kv_events=any(wish.kv_events for wish in wishes),
        )

    def _tell_listeners(self) -> None:
        control = self._engine.control
        stats, kv_events = control.take_stats(), control.take_kv_events()
        for frontend_id, wanted in self._listeners.items():
            observed = Observed(
                stats if wanted.stats else None, kv_events if wanted.kv_events else ()
            )
            if observed.stats is not None or observed.kv_events:
                self._answers.say(frontend_id, observed)

    # --- answers --------------------------------------------------------------

    def _report(self, outputs: list[EngineOutput]) -> None:
        """One message a lane for all that this round has to say."""
        said_by_lane: defaultdict[int, list[EngineOutput]] = defaultdict(list)
        accepted_by_lane: defaultdict[int, list[int]] = defaultdict(list)
        for client_id in self._accepted:
            accepted_by_lane[frontend_of(client_id)].append(client_id)
        for output in self._refused:
            said_by_lane[frontend_of(output.request_id)].append(output)
        for output in outputs:
            if self._record(output):
                said_by_lane[frontend_of(output.request_id)].append(output)
        self._accepted.clear()
        self._refused.clear()
        for frontend_id in {**accepted_by_lane, **said_by_lane}:
            accepted, said = accepted_by_lane[frontend_id], said_by_lane[frontend_id]
            if frontend_id in self._ended_lanes:
                self._let_go(said)
            elif not self._answers.say(frontend_id, Outputs(tuple(accepted), tuple(said))):
                self._is_stopped = True

    def _record(self, output: EngineOutput) -> bool:
        event = _TOKENS
        if output.error is not None or output.finish is not None:
            event = Event.FINISH if output.error is None else _event_of(output.error)
            self._names.give_back(output.request_id)
        outcome = self._ledger.apply(output.request_id, event)
        if outcome is _APPLIED:
            return True
        logger.error("the engine spoke of %#x, which is %s", output.request_id, outcome)
        return False

    def _let_go(self, outputs: list[EngineOutput]) -> None:
        """Leases that nobody will hear of."""
        for output in outputs:
            params = output.finish.context_phase_params if output.finish is not None else None
            if params is not None:
                self._engine.release(params.disagg_request_id, params.pull_token)

    def _audit(self, call_id: int) -> AuditReply:
        self._ledger.check()
        self._names.check()
        assert len(self._names) == len(self._ledger)
        counters = {
            **{f"entries_{k}": v for k, v in self._ledger.entries_by_state().items()},
            **self._ledger.counters(),
            "bad_frames": self._answers.num_bad_frames,
            "unsaid": self._answers.num_unsaid,
            "rounds": self._progress,
        }
        return AuditReply(call_id, self._engine.audit(), counters)


def _event_of(error: ErrorData) -> Event:
    return Event.CONFIRM if error.kind == RequestCancelledError.__name__ else Event.FAIL
