"""A frontend's books, windows and desks in one thread, under deaths, cancels and delays.

Real LiveRequests, BucketWindow and Desk; the engine, the processes and the wires
between are played here, and hypothesis decides who gets on when. Against a plain
model: every request ends once, with the text its tokens have (or its start, where it
failed); a lease is told to a consumer or released, never both and never neither;
a worker's table is empty when nobody lives.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.engine.seam import EngineFinish, EngineOutput
from executor.executor import ExecutorRequest, GenerationResult
from executor.messages import Cancel, Outputs, Release, Submit
from executor.post.desk import Desk
from executor.post.grouping import divided
from executor.post.limits import PostLimits
from executor.post.messages import Answer, Work, bucket_of, unpack_outputs
from executor.post.packing import packed_answers
from executor.post.window import BucketWindow
from executor.postprocess import TextParams
from executor.requests import LiveRequests
from protos.errors import (
    BatonError,
    PostprocessError,
    RequestCancelledError,
    ServerUnavailableError,
)
from protos.messages import ContextPhaseParams, DisaggRequestId, FinishReason, Usage
from tests.support.executor_scripted import CharTokenizer, context_request, request
from tests.support.serving_double import hand_off

NUM_BUCKETS = 2
LIMITS = PostLimits(works_in_flight_max=2, work_bytes_max=400)
BYTES_MAX = 1500
"""Of a message either way: less than the rules may have to tell at once, more than one end."""
ENVELOPE_BYTES = 64
TOY: Any = CharTokenizer()
picks = st.integers(0, 99)
buckets = st.integers(0, NUM_BUCKETS - 1)


@dataclass
class Sequence:
    """One request at the engine."""

    ids: tuple[int, ...]
    lease: ContextPhaseParams | None = None
    num_said: int = 0


class Engine:
    """Also the queue to it: `put` and `offer` are RequestQueue's."""

    def __init__(self) -> None:
        self.running: dict[int, Sequence] = {}
        self.cancelled: list[int] = []
        self.released: Counter[DisaggRequestId] = Counter()
        self.leased: dict[DisaggRequestId, None] = {}
        self.next: Sequence | None = None

    def offer(self, message: Any) -> bool:
        assert isinstance(message, Submit)
        assert self.next is not None
        self.running[message.request.request_id] = self.next
        return True

    def put(self, message: Any) -> None:
        match message:
            case Cancel():
                self.cancelled.append(message.client_id)
            case Release():
                self.released[message.disagg_request_id] += 1

    def step(self, num_tokens: int, picked: list[int]) -> Outputs:
        said = [
            self._cancel(client_id) for client_id in self.cancelled if client_id in self.running
        ]
        self.cancelled = []
        said += [self._go_on(each, num_tokens) for each in picked if each in self.running]
        return Outputs((), tuple(said))

    def _cancel(self, client_id: int) -> EngineOutput:
        sequence = self.running.pop(client_id)
        finish = EngineFinish(reason=FinishReason.LENGTH, usage=_usage(sequence.num_said))
        error = RequestCancelledError("it was").to_data()
        return EngineOutput(request_id=client_id, error=error, finish=finish)

    def _go_on(self, client_id: int, num_tokens: int) -> EngineOutput:
        sequence = self.running[client_id]
        index = sequence.num_said
        ids = sequence.ids[index : index + num_tokens]
        sequence.num_said += len(ids)
        finish = None
        if sequence.num_said == len(sequence.ids):
            del self.running[client_id]
            reason = FinishReason.LENGTH if sequence.lease is None else FinishReason.CONTEXT
            usage = _usage(sequence.num_said)
            finish = EngineFinish(reason=reason, usage=usage, context_phase_params=sequence.lease)
            if sequence.lease is not None:
                self.leased[sequence.lease.disagg_request_id] = None
        return EngineOutput(request_id=client_id, token_index=index, token_ids=ids, finish=finish)


class Bucket:
    """A window, and the worker and the wires that hypothesis moves."""

    def __init__(self) -> None:
        self.window = BucketWindow(LIMITS, BYTES_MAX)
        self.desk: Desk | None = Desk(TOY)
        self.is_in_process = False
        self.works: deque[Work] = deque()
        self.answers: deque[Answer] = deque()

    def send(self) -> None:
        while self.desk is not None and (work := self.window.take(0.0)) is not None:
            self.works.append(work)

    def die(self) -> list[bytes]:
        payloads = self.window.retire()
        self.window, self.desk = BucketWindow(LIMITS, BYTES_MAX), None
        self.works.clear()
        self.answers.clear()
        return payloads


class Pool:
    """What LiveRequests asks of a PostPool."""

    def __init__(self) -> None:
        self.buckets = [Bucket() for _ in range(NUM_BUCKETS)]

    def bucket_of(self, client_id: int) -> int:
        return bucket_of(client_id, NUM_BUCKETS)

    def open(self, client_id: int, params: TextParams) -> bool:
        bucket = self.buckets[self.bucket_of(client_id)]
        if not bucket.is_in_process:
            bucket.window.open(client_id, params)
        return not bucket.is_in_process

    def forget(self, client_id: int) -> None:
        bucket = self.buckets[self.bucket_of(client_id)]
        bucket.window.forget(client_id)
        bucket.send()


@dataclass
class Told:
    """What a request must say where nothing goes wrong."""

    result: GenerationResult
    ids: tuple[int, ...]
    stop: str
    was_cancelled: bool = False
    was_failed: bool = False

    def check(self) -> None:
        """As far as it has come."""
        answer = self.result._answer
        text, num_tokens = self._whole()
        assert answer.token_ids == self.ids[:num_tokens][: len(answer.token_ids)]
        assert text.startswith(answer.text)
        if not self.result.is_ended:
            return
        if self.result.error is not None:
            kinds: list[type[BatonError]] = [PostprocessError]
            kinds += [RequestCancelledError] if self.was_cancelled else []
            kinds += [ServerUnavailableError] if self.was_failed else []
            assert type(self.result.error) in kinds
            return
        last = answer.last
        assert last is not None
        assert last.finish is not None
        assert (answer.text, len(answer.token_ids)) == (text, num_tokens)
        assert last.finish.usage.completion_tokens == num_tokens
        is_stopped = num_tokens < len(self.ids) or (
            bool(self.stop) and text + self.stop == _spell(self.ids)
        )
        assert (last.finish.reason is FinishReason.STOP) == is_stopped
        assert last.stop_string == (self.stop if is_stopped else "")

    def _whole(self) -> tuple[str, int]:
        text = _spell(self.ids)
        at = text.find(self.stop) if self.stop else -1
        return (text, len(text)) if at < 0 else (text[:at], at + len(self.stop))


class PostMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.pool = Pool()
        queue: Any = self.engine
        pool: Any = self.pool
        self.requests = LiveRequests(queue, TOY, tombstones_max=999, grace_s=1.0, post=pool)
        self.told: list[Told] = []

    # --- clients ------------------------------------------------------------------

    @rule(length=st.integers(1, 12), stop=st.sampled_from(("", (0, 1), (2, 2), (3, 1), (99, 1))))
    def submit(self, length: int, stop: Any) -> None:
        """Every character is one token; `stop` is cut out of the answer or never comes."""
        ids = tuple(range(len(self.told), len(self.told) + length))
        start, size = stop or (0, 0)
        word = _spell(ids[start : start + size]) if start < 99 else "never"
        stops = (word,) if word else ()
        self._submit(
            request(f"r{len(self.told)}", max_tokens=length, stop=stops), Sequence(ids), word
        )

    @rule()
    def submit_context(self) -> None:
        asked = context_request(f"c{len(self.told)}", (1, 2), attempt=len(self.told))
        self._submit(asked, Sequence((7,), hand_off(asked, 7)), "")

    def _submit(self, asked: ExecutorRequest, sequence: Sequence, stop: str) -> None:
        self.engine.next = sequence
        result = self.requests.submit(asked, 0.0)
        self.told.append(Told(result, sequence.ids, stop))

    @precondition(lambda self: self.told)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        told = self.told[-1 - pick % min(len(self.told), 5)]
        told.was_cancelled = True
        self.requests.cancel(told.result.client_id)

    @rule()
    def begin_trouble(self) -> None:
        """The engine's worker is silent: the frontend ends what is open, whoever speaks later."""
        for told in self.told:
            told.was_failed = told.was_failed or not told.result.is_ended
        self.requests.fail_all(ServerUnavailableError("it is silent"), cancel=True)

    # --- who gets on ----------------------------------------------------------------

    @rule(num_tokens=st.integers(1, 4), mask=st.integers(0, 255))
    def step(self, num_tokens: int, mask: int) -> None:
        running = list(self.engine.running)
        self._step(num_tokens, [c for i, c in enumerate(running) if mask >> (i % 8) & 1])

    def _step(self, num_tokens: int, picked: list[int]) -> None:
        message = divided(self.engine.step(num_tokens, picked), NUM_BUCKETS)
        self.requests.on_outputs(message.outputs)
        for index, payload in message.buckets:
            bucket = self.pool.buckets[index]
            if bucket.is_in_process:
                self.requests.on_unposted(unpack_outputs(payload))
            else:
                bucket.window.put(payload)
                bucket.send()

    @rule(index=buckets)
    def work(self, index: int) -> None:
        bucket = self.pool.buckets[index]
        if bucket.desk is not None and bucket.works:
            work = bucket.works.popleft()
            is_lone = not (work.opened or work.forgotten or len(work.payloads) > 1)
            assert is_lone or len(msgspec.msgpack.encode(work)) <= BYTES_MAX + ENVELOPE_BYTES
            for body in packed_answers(bucket.desk.handle(work), BYTES_MAX):
                assert len(bytes(body)) <= BYTES_MAX
                bucket.answers.append(msgspec.msgpack.decode(body, type=Answer))

    @rule(index=buckets)
    def hear(self, index: int) -> None:
        bucket = self.pool.buckets[index]
        if bucket.answers:
            answer = bucket.answers.popleft()
            assert bucket.window.on_answer(answer.number, 0.0, is_part=answer.is_part)
            bucket.send()
            self.requests.on_answer(answer)

    @rule(index=buckets, is_for_good=st.sampled_from((False, False, False, True)))
    def die(self, index: int, is_for_good: bool) -> None:
        bucket = self.pool.buckets[index]
        if bucket.is_in_process:
            return
        payloads = bucket.die()
        bucket.is_in_process = is_for_good
        self.requests.fail_bucket(index, PostprocessError("it died"))
        for payload in payloads:
            self.requests.on_unposted(unpack_outputs(payload))

    @rule(index=buckets)
    def restart(self, index: int) -> None:
        bucket = self.pool.buckets[index]
        if bucket.desk is None and not bucket.is_in_process:
            bucket.desk = Desk(TOY)
            bucket.send()

    # --- what must hold ---------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.requests.check()
        for told in self.told[-20:]:
            told.check()
        for bucket in self.pool.buckets:
            bucket.window.check()
            if bucket.desk is not None:
                bucket.desk.check()

    def teardown(self) -> None:
        """Everybody gets on until nothing moves any more."""
        for index in range(NUM_BUCKETS):
            self.restart(index)
        for _ in range(200):
            self._step(4, list(self.engine.running))
            for index in range(NUM_BUCKETS):
                self.work(index)
                self.hear(index)
        assert len(self.requests) == 0
        for told in self.told:
            assert told.result.is_ended
            told.check()
        for bucket in self.pool.buckets:
            assert not bucket.works
            assert not bucket.answers
            assert bucket.window.num_in_flight == 0
            assert bucket.desk is None or len(bucket.desk) == 0
        self._check_leases()

    def _check_leases(self) -> None:
        told: Counter[DisaggRequestId] = Counter()
        for one in self.told:
            last = one.result._answer.last
            finish = None if last is None else last.finish
            if finish is not None and finish.context_phase_params is not None:
                told[finish.context_phase_params.disagg_request_id] += 1
        assert told + self.engine.released == Counter(list(self.engine.leased))


def _spell(ids: tuple[int, ...]) -> str:
    return "".join(chr(0x20000 + token_id) for token_id in ids)


def _usage(num_said: int) -> Usage:
    return Usage(prompt_tokens=3, completion_tokens=num_said)


TestPostMachine = PostMachine.TestCase
TestPostMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
