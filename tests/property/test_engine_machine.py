"""The engine's core under any order of requests, aborts, steps and data-plane events.

What must hold at every instant is `EngineCore.check`; what must hold for each
request is one answer, with the tokens that the double's model would give alone.
At the end every transfer and lease ends, and then everything must come to rest.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.engine.seam import EngineOutput
from kv_transfer.events import (
    LeaseEnded,
    PullFailed,
    PullFinished,
    TransferEnded,
    TransferStarted,
)
from protos.errors import KvTransferError, NotNowError, OverloadedError
from protos.messages import DisaggRequestId, FinishReason, KvStats, RequestType
from tests.support.engine_doubles import HandEngine, completion
from tests.support.engine_requests import request_for

STEPS_TO_REST = 400


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = HandEngine()
        self.core, self.mover = self.engine.core, self.engine.mover
        self.numbers = itertools.count(1)
        self.expected: dict[int, tuple[int, list[int]]] = {}
        self.streamed: dict[int, list[int]] = {}
        self.ended: dict[int, EngineOutput] = {}
        self.transfers: list[DisaggRequestId] = []

    @rule(
        length=st.integers(1, 30),
        head=st.integers(1, 3),
        max_tokens=st.integers(3, 12),
        request_type=st.sampled_from(RequestType),
        deadline_s=st.sampled_from([5.0, 100.0]),
        num_first=st.integers(1, 2),
        num_existing=st.integers(0, 5),
    )
    def submit(
        self,
        length: int,
        head: int,
        max_tokens: int,
        request_type: RequestType,
        deadline_s: float,
        num_first: int,
        num_existing: int,
    ) -> None:
        """`num_existing` tokens of a plain request's answer come along with it."""
        prompt = [head] * length
        is_plain = request_type is RequestType.CONTEXT_AND_GENERATION
        num_existing = min(num_existing, max_tokens - 1) if is_plain else 0
        request_id = next(self.numbers)
        request = request_for(
            request_id,
            prompt,
            request_type,
            max_tokens=max_tokens,
            deadline_s=deadline_s,
            num_first=num_first,
            num_existing=num_existing,
        )
        try:
            self.core.submit(request)
        except NotNowError:
            assert self.core.control.is_asleep
            return
        except OverloadedError:
            waiting = self.core.load().num_queued
            assert waiting == self.engine.limits.max_queued
            return
        is_context = request_type is RequestType.CONTEXT_ONLY
        start = num_first if request_type is RequestType.GENERATION_ONLY else num_existing
        wanted = completion(prompt, 1 if is_context else max_tokens)
        self.expected[request_id] = (start, wanted)
        self.streamed[request_id] = []

    @precondition(lambda self: self.expected)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        self.core.abort(list(self.expected)[pick % len(self.expected)])

    @rule()
    def step(self) -> None:
        self.engine.runner.last = []
        for output in self.core.step():
            self.take(output)
        chunks = self.engine.runner.last
        assert sum(chunk.num_tokens for chunk in chunks) <= self.engine.limits.max_batch_tokens
        assert all(c.num_tokens <= self.engine.limits.prefill_chunk_tokens for c in chunks)
        assert self.core.load().num_running <= self.engine.limits.max_sequences

    def take(self, output: EngineOutput) -> None:
        request_id = output.request_id
        assert request_id in self.expected, "an answer to nobody"
        assert request_id not in self.ended, "a second answer"
        start, wanted = self.expected[request_id]
        streamed = self.streamed[request_id]
        if output.token_ids:
            assert output.token_index == start + len(streamed)
        streamed += output.token_ids
        assert streamed == wanted[start : start + len(streamed)]
        if output.error is not None or output.finish is not None:
            self.ended[request_id] = output
        if output.error is None and output.finish is not None:
            assert len(streamed) == len(wanted) - start
            usage = output.finish.usage
            assert usage.completion_tokens == len(streamed)
            assert 0 <= usage.cached_tokens <= usage.prompt_tokens

    @rule()
    def sleep(self) -> None:
        """It falls asleep exactly where nothing needs it, and caches nothing then."""
        audit = self.core.audit()
        is_needed = bool(audit.sequences_by_state or audit.holders or self.mover.is_busy)
        try:
            self.core.control.sleep()
        except NotNowError:
            assert is_needed
            assert not self.core.control.is_asleep
            return
        assert not is_needed
        assert self.core.audit().blocks_by_state["free"] == self.core.load().blocks_total
        assert not self.core.control.kv_snapshot().block_hashes

    @rule()
    def wake_up(self) -> None:
        self.core.control.wake_up()

    @rule(seconds=st.sampled_from([0.1, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.clock.now_s += seconds

    @precondition(lambda self: self.mover.pulls)
    @rule(pick=st.integers(0, 99), succeeds=st.booleans())
    def end_pull(self, pick: int, succeeds: bool) -> None:
        disagg_id = list(self.mover.pulls)[pick % len(self.mover.pulls)]
        pull = self.mover.pulls.pop(disagg_id)
        if succeeds:
            stats = KvStats(transferred_tokens=pull.num_tokens)
            self.mover.put(PullFinished(disagg_id, stats))
        else:
            self.mover.put(PullFailed(disagg_id, KvTransferError("by hand").to_data()))

    @precondition(lambda self: self.mover.offers)
    @rule(pick=st.integers(0, 99))
    def start_transfer(self, pick: int) -> None:
        disagg_id = list(self.mover.offers)[pick % len(self.mover.offers)]
        if disagg_id not in self.transfers:
            self.transfers.append(disagg_id)
            self.mover.put(TransferStarted(disagg_id))

    @precondition(lambda self: self.mover.offers)
    @rule(pick=st.integers(0, 99))
    def end_lease(self, pick: int) -> None:
        disagg_id = list(self.mover.offers)[pick % len(self.mover.offers)]
        del self.mover.offers[disagg_id]
        self.mover.put(LeaseEnded(disagg_id, "expired"))

    @precondition(lambda self: self.transfers)
    @rule(pick=st.integers(0, 99))
    def end_transfer(self, pick: int) -> None:
        self.mover.put(TransferEnded(self.transfers.pop(pick % len(self.transfers))))

    @invariant()
    def fits_together(self) -> None:
        self.core.check()
        held_by_leases = self.core.audit().blocks_by_owner.get("lease", 0)
        assert held_by_leases <= max(self.engine.limits.max_leased_blocks, 8)

    def teardown(self) -> None:
        """Liveness: once the data plane ends what it holds, every request ends."""
        for _ in range(STEPS_TO_REST):
            while self.mover.pulls:
                self.end_pull(0, succeeds=True)
            while self.transfers:
                self.end_transfer(0)
            while self.mover.offers:
                self.end_lease(0)
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work()
        assert sorted(self.ended) == sorted(self.expected)
        audit = self.core.audit()
        assert not audit.holders, audit.holders
        assert not audit.sequences_by_state
        for request_id, output in self.ended.items():
            if output.finish is not None and output.finish.reason is FinishReason.CONTEXT:
                assert self.streamed[request_id]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
