"""The worker's loop: it alone drives the engine.

Life: HELLO before anything is loaded, READY with the engine's identity, then
rounds of drain the inbox, step, send what the step said as one message, sleep
where there is nothing to do. It ends by `Stop` (cleanly), or by an exception
of the engine: DIED with the cause is then the last message.

Three threads stand around it: one receives, one beats the heart, one (in
worker_main) watches for the parent's end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from executor.config import EngineConfig
from executor.engine.seam import Engine, EngineOutput
from executor.inbox import Inbox
from executor.ipc import FrameReceiver
from executor.ledger import Adoption, Event, Ledger, Outcome
from executor.messages import (
    AuditQuery,
    AuditReply,
    Cancel,
    Heartbeat,
    LoadQuery,
    LoadReply,
    Outputs,
    Ready,
    Release,
    Renew,
    Reply,
    Stop,
    Submit,
    ToWorker,
)
from executor.outbox import Outbox
from protos.errors import ErrorData, RequestCancelledError, RequestError

logger = logging.getLogger(__name__)

CreateEngine = Callable[[EngineConfig, Callable[[], None]], Engine]


class Receiver(threading.Thread):
    """Moves authenticated frames from the request socket into the inbox."""

    def __init__(self, receiver: FrameReceiver[ToWorker], inbox: Inbox, batch_max: int) -> None:
        super().__init__(name="receiver", daemon=True)
        self._receiver = receiver
        self._inbox = inbox
        self._batch_max = batch_max

    def run(self) -> None:
        try:
            while True:
                self._receiver.socket.poll(None, zmq.POLLIN)
                self._inbox.put(self._receiver.drain(self._batch_max))
        except zmq.ContextTerminated:  # how the main thread ends us
            self._receiver.socket.close(linger=0)


class Heart(threading.Thread):
    """Reports the loop's progress, from outside the loop, so that a stuck one shows."""

    def __init__(self, worker: Worker, outbox: Outbox, period_s: float) -> None:
        super().__init__(name="heart", daemon=True)
        self._worker = worker
        self._outbox = outbox
        self._period_s = period_s
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self._outbox.beat(self._worker.heartbeat())

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class Worker:
    """The loop and its ledger. `count_bad_frames` reads the receiving side's counter."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        outbox: Outbox,
        *,
        tombstones_max: int,
        count_bad_frames: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._ledger = Ledger(tombstones_max=tombstones_max)
        self._count_bad_frames = count_bad_frames
        self._progress = 0
        self._is_busy = False
        self._is_stopped = False
        self._accepted: list[int] = []
        self._refused: list[EngineOutput] = []

    def heartbeat(self) -> Heartbeat:
        """`progress` takes in what the engine does within a step: a large model's step is long."""
        return Heartbeat(self._progress + self._engine.progress, self._is_busy)

    def run(self) -> None:
        """Until `Stop`. Raises what the engine raised: it is dead then."""
        self._outbox.say(Ready(self._engine.identity))
        while not self._is_stopped:
            self._round()

    def _round(self) -> None:
        engine = self._engine
        messages = self._inbox.take(0 if engine.has_work() else engine.next_deadline_s())
        self._is_busy = True
        self._progress += 1
        for message in messages:
            self._handle(message)
        if not self._is_stopped:
            self._report(engine.step())
        self._is_busy = False

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._cancel(message.client_id)
            case Release():
                done = self._engine.release(message.disagg_request_id, message.pull_token)
                self._outbox.say(Reply(message.call_id, done))
            case Renew():
                done = self._engine.renew(message.disagg_request_id, message.pull_token)
                self._outbox.say(Reply(message.call_id, done))
            case LoadQuery():
                self._outbox.say(LoadReply(message.call_id, self._engine.load()))
            case AuditQuery():
                self._outbox.say(self._audit(message.call_id))
            case Stop():
                self._is_stopped = True

    def _submit(self, message: Submit) -> None:
        client_id = message.request.request_id
        adoption = self._ledger.adopt(client_id)
        if adoption is Adoption.REFUSED:
            error = RequestCancelledError("the request was cancelled before it came")
            self._refused.append(EngineOutput(request_id=client_id, error=error.to_data()))
        if adoption is not Adoption.NEW:
            return
        try:
            self._engine.submit(message.request)
        except RequestError as error:
            self._ledger.apply(client_id, Event.FAIL)
            self._refused.append(EngineOutput(request_id=client_id, error=error.to_data()))
            return
        self._ledger.apply(client_id, Event.SEND)
        self._ledger.apply(client_id, Event.ACCEPT)
        self._accepted.append(client_id)

    def _cancel(self, client_id: int) -> None:
        match self._ledger.apply(client_id, Event.CANCEL):
            case Outcome.APPLIED:
                self._engine.abort(client_id)
            case Outcome.UNKNOWN:
                self._ledger.refuse(client_id)
            case Outcome.LATE:
                pass

    def _report(self, outputs: list[EngineOutput]) -> None:
        """One message for all that this round has to say."""
        outputs = [output for output in outputs if self._record(output)]
        if not (outputs or self._refused or self._accepted):
            return
        message = Outputs(tuple(self._accepted), (*self._refused, *outputs))
        self._accepted.clear()
        self._refused.clear()
        if not self._outbox.say(message):
            self._is_stopped = True

    def _record(self, output: EngineOutput) -> bool:
        if output.error is not None:
            event = _event_of(output.error)
        else:
            event = Event.TOKENS if output.finish is None else Event.FINISH
        outcome = self._ledger.apply(output.request_id, event)
        if outcome is not Outcome.APPLIED:
            logger.error("the engine spoke of %#x, which is %s", output.request_id, outcome)
        return outcome is Outcome.APPLIED

    def _audit(self, call_id: int) -> AuditReply:
        self._ledger.check()
        counters = {
            **{f"entries_{k}": v for k, v in self._ledger.entries_by_state().items()},
            **self._ledger.counters(),
            "bad_frames": self._count_bad_frames(),
            "rounds": self._progress,
        }
        return AuditReply(call_id, self._engine.audit(), counters)


def _event_of(error: ErrorData) -> Event:
    return Event.CONFIRM if error.kind == RequestCancelledError.__name__ else Event.FAIL
