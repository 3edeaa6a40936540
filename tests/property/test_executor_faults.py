"""Proxy books and worker loop over the scripted engine, in one thread, under random faults.

No process and no socket: the two sides' messages wait in lists that hypothesis
delivers, and the engine's clock is a variable. The worker may die at any point.
The checker is DESIGN.md's first invariant: one answer each, never zero, never two.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.config import EngineConfig, KvCacheConfig
from executor.engine.scripted import ScriptedEngine
from executor.engine.scripted_model import scripted_completion
from executor.inbox import Inbox
from executor.lane import OWNER_ID
from executor.messages import Cancel, Outputs, Ready, Release, Submit
from executor.request import ExecutorRequest
from executor.request_queue import RequestQueue
from executor.requests import LiveRequests
from executor.result import GenerationResult
from executor.worker import Worker
from protos.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    EngineDeadError,
    OverloadedError,
    RequestCancelledError,
)
from protos.tokens import pack_token_ids
from tests.support.executor_scripted import CharTokenizer, request

QUEUE_MAX = 4


class ToWorkerLine:
    """Stands where the sender of frames stands: bounded, ordered."""

    def __init__(self) -> None:
        self.messages: deque[Submit | Cancel | Release] = deque()

    def send(self, message: Any) -> bool:
        if len(self.messages) >= QUEUE_MAX:
            return False
        self.messages.append(message)
        return True


class ToProxyLine:
    def __init__(self) -> None:
        self.messages: deque[Outputs] = deque()

    def say(self, frontend_id: int, message: Any) -> bool:
        assert frontend_id == OWNER_ID
        if isinstance(message, Outputs):
            self.messages.append(message)
        return True

    def greet(self, greeting: Ready) -> None: ...

    def flush(self) -> bool:
        return True

    num_bad_frames = 0
    num_unsaid = 0


class ExecutorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.config = EngineConfig(
            engine="scripted", kv_cache=KvCacheConfig(num_blocks=4, tokens_per_block=4)
        )
        self.engine = ScriptedEngine(self.config, clock=lambda: self.now_s, sleep=lambda _: None)
        self.to_worker = ToWorkerLine()
        self.to_proxy = ToProxyLine()
        self.inbox = Inbox(64)
        self.worker = Worker(self.engine, self.inbox, self.to_proxy, tombstones_max=8)
        self.queue = RequestQueue(cast(Any, self.to_worker))
        self.live = LiveRequests(
            self.queue, cast(Any, CharTokenizer()), tombstones_max=8, grace_s=1.0
        )
        self.results: dict[int, tuple[ExecutorRequest, GenerationResult]] = {}
        self.is_dead = False

    @rule(
        name=st.sampled_from("abcd"),
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        max_tokens=st.integers(1, 6),
        deadline_s=st.sampled_from((2.0, 100.0)),
        stops_at=st.integers(0, 8),
    )
    def submit(
        self, name: str, prompt: list[int], max_tokens: int, deadline_s: float, stops_at: int
    ) -> None:
        completion = self._completion(tuple(prompt), 9)
        stop = CharTokenizer().decode(completion[stops_at : stops_at + 1])
        asked = request(
            name, tuple(prompt), max_tokens=max_tokens, deadline_s=deadline_s, stop=(stop,)
        )
        was_live = self.live.ledger.find(name) is not None
        if self.is_dead:
            return
        try:
            result = self.live.submit(asked, self.now_s)
        except DuplicateRequestError:
            assert was_live
        except OverloadedError:
            assert len(self.to_worker.messages) >= QUEUE_MAX or len(self.queue)
        else:
            self.results[result.client_id] = (asked, result)

    @rule(client_id=st.integers(1, 12))
    def cancel(self, client_id: int) -> None:
        self.live.cancel(client_id)

    @precondition(lambda self: not self.is_dead)
    @rule(num_messages=st.integers(0, 4))
    def work(self, num_messages: int) -> None:
        """The worker receives a few messages and goes one round."""
        for _ in range(min(num_messages, len(self.to_worker.messages))):
            self.inbox.put([(OWNER_ID, self.to_worker.messages.popleft())])
        self.inbox.wake()
        self.worker._round()
        self.engine.audit()

    @rule(num_messages=st.integers(1, 3))
    def deliver(self, num_messages: int) -> None:
        for _ in range(min(num_messages, len(self.to_proxy.messages))):
            message = self.to_proxy.messages.popleft()
            for client_id in message.accepted:
                self.live.on_accepted(client_id)
            for output in message.outputs:
                self.live.on_output(output)

    @rule(duration_s=st.sampled_from((0.5, 4.0)))
    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.live.expire(self.now_s)
        self.queue.flush()

    @precondition(lambda self: not self.is_dead and len(self.results) > 3)
    @rule()
    def die(self) -> None:
        self.is_dead = True
        self.live.fail_all(EngineDeadError("killed"), cancel=False)

    @invariant()
    def books_balance(self) -> None:
        self.live.check()
        for client_id, (_, result) in self.results.items():
            is_live = client_id in self.live.ledger.live()
            assert result.is_ended != is_live  # a live one has no answer, a dead one has one

    def teardown(self) -> None:
        """Liveness: without further faults everything ends, with the right tokens."""
        for _ in range(200):
            self.queue.flush()
            if not self.is_dead:
                self.work(QUEUE_MAX)
            self.deliver(3)
        self.books_balance()
        assert not len(self.live)
        for asked, result in self.results.values():
            self._check_answer(asked, result)
        if not self.is_dead:
            assert self.engine.audit().blocks_by_state["live"] == 0

    def _check_answer(self, asked: ExecutorRequest, result: GenerationResult) -> None:
        expected = self._completion(asked.prompt_token_ids, asked.sampling.max_tokens or 0)
        text = CharTokenizer().decode(expected)
        (stop,) = asked.sampling.stop
        num_tokens = text.index(stop) + 1 if stop in text else len(expected)
        streamed = result._answer.token_ids
        assert streamed == expected[: len(streamed)]
        assert len(streamed) <= num_tokens
        if result._error is None:
            assert len(streamed) == num_tokens
        else:
            kinds = (RequestCancelledError, DeadlineExceededError, EngineDeadError)
            assert isinstance(result._error, kinds)

    def _completion(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        packed = pack_token_ids(prompt)
        return scripted_completion(packed, 7, num_tokens, self.config.scripted)


ExecutorMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestExecutorMachine = ExecutorMachine.TestCase
