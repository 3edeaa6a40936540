"""The proxy's live requests: ledger, results and text, kept in step.

Every request gets one terminal answer here, whatever comes first: the engine's
end, a refusal, a cancel's confirmation, its deadline, or the engine's death.

With postprocess workers (executor/post) text comes from them, chunk by chunk;
errors come straight from the engine and may overtake it. A worker's death ends
the requests of its bucket.
"""

from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor.engine.seam import EngineOutput
from executor.home import Home
from executor.ledger import LIVE, Event, Ledger, Outcome, State
from executor.messages import Cancel, Release, Submit
from executor.post.messages import Answer, Lease, PostChunk, lease_of
from executor.post.posted import PostedText
from executor.postprocess import Postprocessor, TextParams, text_params
from executor.request import ExecutorRequest, to_engine_request
from executor.request_queue import RequestQueue
from executor.result import GenerationResult
from protos.errors import (
    BatonError,
    DeadlineExceededError,
    OverloadedError,
    RequestCancelledError,
    RequestFailedError,
    describe,
    from_data,
)

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer
    from executor.post.pool import PostPool

logger = logging.getLogger(__name__)
_TOKENS, _APPLIED = Event.TOKENS, Outcome.APPLIED
"""Asked once per token: looking an enum's member up is slow before Python 3.12."""
UNAWAITED_CALL = 0
"""The call id of a control message whose answer nobody waits for."""


@dataclass(slots=True)
class _Live:
    result: GenerationResult
    text: Postprocessor | PostedText
    ends_at_s: float


class LiveRequests:
    """Times are parameters. `grace_s`: how much later than the engine we end an expired one."""

    def __init__(
        self,
        queue: RequestQueue,
        tokenizer: Tokenizer | None,
        *,
        frontend_id: int = 0,
        tombstones_max: int,
        grace_s: float,
        post: PostPool | None = None,
    ) -> None:
        self.ledger = Ledger(frontend_id=frontend_id, tombstones_max=tombstones_max)
        self.home = Home.here()
        self._queue = queue
        self._tokenizer = tokenizer
        self._grace_s = grace_s
        self._post = post
        self._live: dict[int, _Live] = {}
        self._deadlines: list[tuple[float, int]] = []
        self.num_dropped_tokens = 0
        self.num_logits_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def submit(self, request: ExecutorRequest, now_s: float) -> GenerationResult:
        """Register, then send. Raises RequestError; nothing is left of it then."""
        params = text_params(request, self._tokenizer)
        client_id = self.ledger.register(request.external_id)
        try:
            return self._send(client_id, request, params, now_s)
        except BaseException as error:
            self._unregister(client_id)
            if not isinstance(error, BatonError):  # a defect: nobody knows how far it came
                self._queue.put(Cancel(client_id))
            raise

    def _send(
        self, client_id: int, request: ExecutorRequest, params: TextParams, now_s: float
    ) -> GenerationResult:
        """Whatever it raises, the caller takes the entry back. The engine may answer at once,
        so all stands before the message leaves."""
        text = self._text_for(client_id, params)
        result = GenerationResult(
            client_id,
            self.cancel,
            home=self.home,
            request=request,
            max_unread_tokens=request.max_unread_tokens,
        )
        ends_at_s = now_s + request.deadline_s + self._grace_s
        submit = Submit(to_engine_request(request, client_id), request.external_id)
        self._live[client_id] = _Live(result, text, ends_at_s)
        self._push_deadline(ends_at_s, client_id)
        if not self._queue.offer(submit):
            raise OverloadedError("the engine's request queue is full")
        self.ledger.apply(client_id, Event.SEND)
        return result

    def _unregister(self, client_id: int) -> None:
        """`submit` raises, and nobody holds its result: nothing is left of it."""
        live = self._live.pop(client_id, None)
        if self._post is not None and (live is None or isinstance(live.text, PostedText)):
            self._post.forget(client_id)
        if self.ledger.state(client_id) in LIVE:
            self.ledger.apply(client_id, Event.FAIL)

    def _text_for(self, client_id: int, params: TextParams) -> Postprocessor | PostedText:
        if self._post is not None and self._post.open(client_id, params):
            return PostedText(params)
        return Postprocessor(params, self._tokenizer)

    def cancel(self, client_id: int) -> None:
        """Unknown and ended ids are counted and ignored; a second cancel changes nothing."""
        is_first = self.ledger.state(client_id) is not State.CANCELLING
        if self.ledger.apply(client_id, Event.CANCEL) is Outcome.APPLIED and is_first:
            self._queue.put(Cancel(client_id))

    def on_accepted(self, client_id: int) -> None:
        self.ledger.apply(client_id, Event.ACCEPT)

    def on_outputs(self, outputs: tuple[EngineOutput, ...]) -> None:
        """What one message says. Mostly it is one more step of a stream: the short way."""
        lives, apply = self._live, self.ledger.apply
        for output in outputs:
            if output.finish is not None or output.error is not None:
                self._on_end(output)
            elif apply(output.request_id, _TOKENS) is _APPLIED:
                self._absorb(lives[output.request_id], output, is_end=False)

    def _on_end(self, output: EngineOutput) -> None:
        client_id = output.request_id
        live = self._live.get(client_id)
        if self.ledger.apply(client_id, _ending_of(output, live)) is not _APPLIED:
            params = output.finish.context_phase_params if output.finish is not None else None
            if params is not None:
                self._let_go(client_id, lease_of(params))
            return
        assert live is not None  # the ledger and this table hold the same ids
        if output.error is not None and not live.text.is_stopped:
            self._drop(client_id)
            live.result.fail(from_data(output.error))
            return
        self._absorb(live, output, is_end=True)

    def on_answer(self, answer: Answer) -> None:
        """A postprocess worker's, to one of its works."""
        for chunk in answer.chunks:
            self._on_chunk(chunk)
        for client_id, data in answer.failed:
            if client_id in self._live:
                self.fail(client_id, from_data(data))
                self._queue.put(Cancel(client_id))
        for lease in answer.leases:
            self._release(lease)
        for orphan in answer.orphans:
            self._let_go(orphan.client_id, orphan.lease)
        self.num_dropped_tokens += answer.num_dropped_tokens

    def on_unposted(self, outputs: tuple[EngineOutput, ...]) -> None:
        """Of a bucket whose worker is dead: served here, or late."""
        self.on_outputs(outputs)

    def fail_bucket(self, bucket: int, error: BatonError) -> None:
        """Its worker died, and all of its text with it."""
        assert self._post is not None
        for client_id in list(self._live):
            if self._post.bucket_of(client_id) == bucket:
                self.fail(client_id, error)
                self._queue.put(Cancel(client_id))

    def fail(self, client_id: int, error: BatonError) -> None:
        """End one from our side."""
        live = self._drop(client_id)
        self.ledger.apply(client_id, Event.FAIL)
        live.result.fail(error)

    def fail_all(self, error: BatonError, *, cancel: bool) -> None:
        """`cancel` where the worker lives and must let go of them too."""
        for client_id in list(self._live):
            self.fail(client_id, error)
            if cancel:
                self._queue.put(Cancel(client_id))

    def expire(self, now_s: float) -> None:
        """End what the engine should have ended by now: it hangs, or is far behind."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            client_id = heapq.heappop(self._deadlines)[1]
            if client_id in self._live:
                message = "the request's deadline passed and the engine did not end it"
                self.fail(client_id, DeadlineExceededError(message, field="deadline_ms"))
                self._queue.put(Cancel(client_id))

    def check(self) -> None:
        """Raises AssertionError where ledger and results disagree."""
        self.ledger.check()
        assert set(self.ledger.live()) == set(self._live)
        assert not any(live.result.is_ended for live in self._live.values())

    def _absorb(self, live: _Live, output: EngineOutput, *, is_end: bool) -> None:
        client_id, text = output.request_id, live.text
        was_stopped = text.is_stopped
        try:
            chunk = text.absorb(output)
        except Exception as error:
            logger.exception("postprocessing request %#x failed", client_id)
            self._end_after_defect(live, client_id, error, is_end=is_end)
            if output.finish is not None and output.finish.context_phase_params is not None:
                self._release(lease_of(output.finish.context_phase_params))
            return
        if output.local is not None:
            self.num_logits_bytes += live.result.add_logits(output.local)
        if is_end:
            self._drop(client_id)
            self.num_dropped_tokens += text.num_dropped
        elif text.is_stopped and not was_stopped:
            self.cancel(client_id)
        if chunk is not None:
            live.result.push(chunk)
        if text.lease_to_release is not None:
            self._release(lease_of(text.lease_to_release))

    def _on_chunk(self, chunk: PostChunk) -> None:
        """Late where an error or our own end came first."""
        client_id, finish = chunk.client_id, chunk.finish
        live = self._live.get(client_id)
        event = Event.TOKENS if finish is None else Event.FINISH
        if self.ledger.apply(client_id, event) is not Outcome.APPLIED:
            if finish is not None and finish.context_phase_params is not None:
                self._let_go(client_id, lease_of(finish.context_phase_params))
            return
        assert live is not None
        assert isinstance(live.text, PostedText)
        was_stopped = live.text.is_stopped
        said = live.text.take(chunk)
        if finish is not None:
            del self._live[client_id]
        elif live.text.is_stopped and not was_stopped:
            self.cancel(client_id)
        live.result.push(said)

    def _drop(self, client_id: int) -> _Live:
        """It ends otherwise than by its postprocess worker's last chunk, if it has one."""
        live = self._live.pop(client_id)
        if self._post is not None and isinstance(live.text, PostedText):
            self._post.forget(client_id)
        return live

    def _let_go(self, client_id: int, lease: Lease) -> None:
        """A context phase that finished after we had ended it left a lease that nobody knows.
        A second copy of its end did not: whoever read the first has that lease."""
        if self.ledger.end_of(client_id) is not State.FINISHED:
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        self._queue.put(Release(UNAWAITED_CALL, lease.disagg_request_id, lease.pull_token))

    def _end_after_defect(
        self, live: _Live, client_id: int, error: Exception, *, is_end: bool
    ) -> None:
        failure = RequestFailedError(f"postprocessing failed: {describe(error)}")
        if is_end:  # the ledger has its end already
            self._drop(client_id)
            live.result.fail(failure)
        else:
            self.fail(client_id, failure)
            self._queue.put(Cancel(client_id))

    def _push_deadline(self, ends_at_s: float, client_id: int) -> None:
        heapq.heappush(self._deadlines, (ends_at_s, client_id))
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [(live.ends_at_s, key) for key, live in self._live.items()]
            heapq.heapify(self._deadlines)


def _ending_of(output: EngineOutput, live: _Live | None) -> Event:
    is_stopped = live is not None and live.text.is_stopped
    if output.error is not None and not is_stopped:
        is_cancel = output.error.kind == RequestCancelledError.__name__
        return Event.CONFIRM if is_cancel else Event.FAIL
    return Event.FINISH
