"""The engine proper: drain, schedule, run, absorb. Knows neither torch nor UCX.

A step:

1. **drain** what the data plane reported: leases that ended, pulls that arrived;
2. end what was aborted or is out of time, admit what fits, start its pulls;
3. **run** the planned chunks through the runner;
4. **absorb** the tokens: stream them, end sequences, offer finished prompts.

The life of a request is the table in scheduler.py; that of its blocks is in
kv_cache.py, and what the data plane holds of them in handoff.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from executor.engine.answers import deadline_exceeded, timing, usage
from executor.engine.control import RankFacts
from executor.engine.control_seam import EngineControl
from executor.engine.core_control import CoreControl
from executor.engine.handoff import Handoffs, KvMover, PullEnd
from executor.engine.intake import make_sequence
from executor.engine.local import LocalOutput
from executor.engine.logits import LogitsDesk
from executor.engine.profiles import Tracer
from executor.engine.runner_seam import ChunkResult, Runner
from executor.engine.scheduler import Chunk, Scheduler
from executor.engine.seam import (
    EngineAudit,
    EngineFinish,
    EngineIdentity,
    EngineOutput,
    EngineRequest,
)
from executor.engine.sequence import Sequence, SequenceState
from protos.errors import (
    BatonError,
    DuplicateRequestError,
    ErrorData,
    RequestCancelledError,
)
from protos.messages import (
    DisaggRequestId,
    FinishReason,
    Load,
    RequestType,
)


class News:
    """A flag that another thread raises, and the wake-up that goes with it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._flag = threading.Event()
        self._wake = wake

    def raise_flag(self) -> None:
        self._flag.set()
        self._wake()

    def is_raised(self) -> bool:
        return self._flag.is_set()

    def lower(self) -> None:
        self._flag.clear()


class EngineCore:
    """Implements the Engine seam over a runner and a mover of KV."""

    def __init__(
        self,
        *,
        identity: EngineIdentity,
        scheduler: Scheduler,
        runner: Runner,
        mover: KvMover,
        news: News,
        facts: RankFacts,
        tracer: Tracer,
        lease_ms: int,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._runner = runner
        self._mover = mover
        self._news = news
        self._handoffs = Handoffs(self._blocks, mover, identity, lease_ms)
        self._clock = clock
        self._cancelled: dict[int, None] = {}
        self._live_handoffs: dict[DisaggRequestId, int] = {}
        self._counters: Counter[str] = Counter()
        self._num_steps = 0
        self._num_load_reports = 0
        self._logits = LogitsDesk(identity.model_info.limits.vocab_size)
        self._control = CoreControl(
            scheduler=scheduler,
            runner=runner,
            mover=mover,
            facts=facts,
            tracer=tracer,
            reset=self._reset_counters,
            clock=clock,
        )
        self._is_closed = False

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def control(self) -> EngineControl:
        return self._control

    # --- the inbox ----------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        self._control.check_awake()
        sequence = make_sequence(request, self._identity, self._clock())
        num_logits_bytes = self._logits.check(request, sequence.num_prompt)
        disagg_request_id = request.disagg_request_id
        if disagg_request_id is not None and self._is_in_use(disagg_request_id):
            raise DuplicateRequestError(
                f"the hand-off {disagg_request_id} is under way on this server already",
                field="disagg_request_id",
                value=disagg_request_id,
            )
        self._scheduler.add(sequence)
        self._logits.promise(request.request_id, num_logits_bytes)
        if disagg_request_id is not None:
            self._live_handoffs[disagg_request_id] = request.request_id
        self._counters["submitted"] += 1

    def _is_in_use(self, disagg_request_id: DisaggRequestId) -> bool:
        return disagg_request_id in self._live_handoffs or self._handoffs.is_known(
            disagg_request_id
        )

    def abort(self, request_id: int) -> None:
        if self._scheduler.find(request_id) is not None:
            self._cancelled[request_id] = None

    def release(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return self._mover.release(disagg_request_id, pull_token)

    def renew(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return self._mover.renew(disagg_request_id, pull_token)

    # --- when to step -------------------------------------------------------

    @property
    def progress(self) -> int:
        return self._runner.progress

    def has_work(self) -> bool:
        if self._news.is_raised() or self._cancelled or self._scheduler.has_work():
            return True
        due_s = self.next_deadline_s()
        return due_s is not None and due_s <= 0

    def next_deadline_s(self) -> float | None:
        deadline_s = self._control.next_due_s(self._scheduler.next_deadline_s())
        return None if deadline_s is None else max(deadline_s - self._clock(), 0.0)

    # --- a step -------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        self._num_steps += 1
        if self._control.is_watching:
            return self._watched_step()
        outputs = self._prepare()
        return outputs + self._run(self._scheduler.plan())

    def _watched_step(self) -> list[EngineOutput]:
        began_s = self._clock()
        outputs = self._prepare()
        chunks = self._scheduler.plan()
        decoding = [c for c in chunks if c.sequence.state is SequenceState.DECODING]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        outputs += self._run(chunks)
        self._control.stepped(
            step_index=self._num_steps,
            began_s=began_s,
            num_outputs=len(outputs),
            num_finished=sum(o.finish is not None or o.error is not None for o in outputs),
            num_prefill_tokens=num_tokens - len(decoding),
            num_decode_tokens=len(decoding),
        )
        return outputs

    def _prepare(self) -> list[EngineOutput]:
        """Hear the data plane, end what is over, admit what fits."""
        outputs = self._drain()
        outputs += self._end_cancelled()
        outputs += self._end_expired()
        self._admit()
        return outputs

    def _run(self, chunks: list[Chunk]) -> list[EngineOutput]:
        return self._absorb(chunks, self._runner.run(chunks)) if chunks else []

    def _drain(self) -> list[EngineOutput]:
        if not self._news.is_raised():
            return []
        # Lowered first: news that comes while we drain raises it again.
        self._news.lower()
        outputs: list[EngineOutput] = []
        # Until it has nothing to tell: only then does a mover that failed say so.
        while events := self._mover.drain_events():
            self._scheduler.blocks_came_back()
            for event in events:
                end = self._handoffs.handle(event)
                if end is not None:
                    outputs += self._on_pull_end(end)
        return outputs

    def _on_pull_end(self, end: PullEnd) -> list[EngineOutput]:
        end.sequence.mark("pulled", self._clock())
        if end.error is not None:
            return [self._end_with_data(end.sequence, end.error)]
        self._scheduler.pulled(end.sequence)
        return []

    def _end_cancelled(self) -> list[EngineOutput]:
        cancelled, self._cancelled = self._cancelled, {}
        sequences = [self._scheduler.find(request_id) for request_id in cancelled]
        return [
            self._end_with_error(sequence, RequestCancelledError("the request was cancelled"))
            for sequence in sequences
            if sequence is not None
        ]

    def _end_expired(self) -> list[EngineOutput]:
        return [
            self._end_with_error(sequence, deadline_exceeded(sequence))
            for sequence in self._scheduler.expired(self._clock())
        ]

    def _admit(self) -> None:
        now_s = self._clock()
        for sequence in self._scheduler.admit(now_s):
            if sequence.state is SequenceState.PULLING:
                self._handoffs.start_pull(sequence, now_s)

    def _absorb(self, chunks: list[Chunk], results: list[ChunkResult]) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for chunk, result in zip(chunks, results, strict=True):
            if result.error is not None:
                outputs.append(self._end_with_error(chunk.sequence, result.error))
                continue
            self._scheduler.computed(chunk)
            self._counters["computed_tokens"] += chunk.num_tokens
            local = self._logits.take(chunk.sequence, chunk.start, result)
            if result.token_id is not None:
                outputs.append(self._take_token(chunk.sequence, result.token_id, local))
        return outputs

    def _take_token(
        self, sequence: Sequence, token_id: int, local: LocalOutput | None
    ) -> EngineOutput:
        index = sequence.num_completion
        self._scheduler.appended(sequence, token_id)
        sequence.mark("first_token", self._clock())
        return EngineOutput(
            request_id=sequence.request_id,
            token_index=index,
            token_ids=(token_id,),
            finish=self._finish_after(sequence, token_id),
            local=local,
        )

    # --- endings ------------------------------------------------------------

    def _finish_after(self, sequence: Sequence, token_id: int) -> EngineFinish | None:
        sampling = sequence.request.sampling
        is_eos = token_id in self._identity.model_info.limits.eos_token_ids
        if token_id in sampling.stop_token_ids or (is_eos and not sampling.ignore_eos):
            return self._finish(sequence, FinishReason.STOP, stop_token_id=token_id)
        if sequence.request_type is RequestType.CONTEXT_ONLY:
            return self._hand_off(sequence)
        if sequence.num_completion >= sequence.max_tokens:
            return self._finish(sequence, FinishReason.LENGTH)
        return None

    def _hand_off(self, sequence: Sequence) -> EngineFinish:
        self._handoffs.pin(sequence)
        now_s = self._clock()
        finish = self._finish(sequence, FinishReason.CONTEXT)
        params = self._handoffs.offer(sequence, finish.usage, finish.timing, now_s)
        return EngineFinish(
            reason=finish.reason,
            usage=finish.usage,
            timing=finish.timing,
            context_phase_params=params,
        )

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None
    ) -> EngineFinish:
        """It lets go of everything; what it used and when."""
        self._forget(sequence)
        self._counters[f"finished_{reason.value}"] += 1
        return EngineFinish(
            reason=reason,
            stop_token_id=stop_token_id,
            usage=usage(sequence),
            kv=sequence.kv,
            timing=timing(sequence, self._clock()),
        )

    def _end_with_error(self, sequence: Sequence, error: BatonError) -> EngineOutput:
        return self._end_with_data(sequence, error.to_data())

    def _end_with_data(self, sequence: Sequence, error: ErrorData) -> EngineOutput:
        """An aborted request still tells what it used: a stop string ends one by an abort."""
        if sequence.state is SequenceState.PULLING and "pulled" not in sequence.marks:
            self._handoffs.abort_pull(sequence)
        finish = None
        if error.kind == RequestCancelledError.__name__:
            finish = self._finish(sequence, FinishReason.STOP)
        else:
            self._forget(sequence)
        self._counters["failed"] += 1
        return EngineOutput(
            request_id=sequence.request_id,
            token_index=sequence.num_completion,
            finish=finish,
            error=error,
        )

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        self._logits.forget(sequence.request_id)
        if sequence.request.disagg_request_id is not None:
            del self._live_handoffs[sequence.request.disagg_request_id]

    # --- the outside --------------------------------------------------------

    def load(self) -> Load:
        self._num_load_reports += 1
        return Load(
            num_queued=self._scheduler.num_queued,
            num_running=self._scheduler.num_running,
            tokens_in_flight=sum(len(s.tokens) for s in self._scheduler.sequences()),
            blocks_free=self._blocks.num_free,
            blocks_total=self._blocks.num_blocks,
            sequence=self._num_load_reports,
        )

    def check(self) -> None:
        """Raises AssertionError where sequences, hand-offs and blocks do not fit together."""
        self._scheduler.check()
        self._handoffs.check()
        live = {s.request.disagg_request_id for s in self._scheduler.sequences()} - {None}
        assert live == set(self._live_handoffs), "the table of hand-offs is wrong"

    def audit(self) -> EngineAudit:
        self.check()
        kv = self._mover.audit()
        gauges = {
            "leases": kv.leases,
            "transfers": kv.transfers,
            "pulls": kv.pulls,
            "operations": kv.operations,
            "peers": kv.peers,
            "evicted_blocks": self._blocks.num_evicted,
            "logits_bytes": self._logits.num_bytes,
            "steps": self._num_steps,
            **self._control.counters(),
        }
        return EngineAudit(
            blocks_by_state=self._blocks.blocks_by_state(),
            blocks_by_owner=self._blocks.blocks_by_owner(),
            holders=self._blocks.holders(),
            sequences_by_state=self._scheduler.sequences_by_state(),
            counters={**self._counters, **self._handoffs.counters, **kv.counters, **gauges},
        )

    def _reset_counters(self) -> None:
        self._counters.clear()
        self._handoffs.counters.clear()

    def close(self) -> None:
        """The mover goes first: until it has stopped, it may touch the pool."""
        if self._is_closed:
            return
        self._is_closed = True
        self._control.close()
        self._mover.close()
        self._cancelled.clear()
        for sequence in self._scheduler.sequences():
            self._forget(sequence)
