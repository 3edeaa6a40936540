"""The postprocess workers of one frontend: one bucket of requests each, by client_id % n.

    start (each spawned, its tokenizer loaded) ──> serving ──> stop
                                                      │
                       a worker exits, or answers nothing for too long: it is
                       killed, its bucket's requests fail at once, a new one starts

While a replacement starts, new requests of its bucket wait for it: their outputs
stay in the bucket's window. A bucket whose workers die too often (PostLimits) is
served in this process from then on, which the log and the counters tell.

All of this belongs to the event loop. Errors and refusals never come this way:
they may overtake text, and what comes late is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from executor.engine.seam import EngineOutput
from executor.ipc import end_context, new_context
from executor.limits import ExecutorLimits
from executor.post.bucket import PostBucket, PostSettings
from executor.post.life import BucketState
from executor.post.messages import Answer, bucket_of, unpack_outputs
from executor.post.spec import TokenizerSpec
from executor.post.watch import AnswerWatch
from executor.postprocess import TextParams
from protos.errors import (
    BatonError,
    ConfigError,
    EngineDeadError,
    ErrorData,
    PostprocessError,
    from_data,
)

logger = logging.getLogger(__name__)
LOOKS_PER_BOUND = 4
LOOK_S_MAX = 0.5


class PostClient(Protocol):
    """Who keeps the requests whose text is made here."""

    def on_answer(self, answer: Answer) -> None: ...

    def on_unposted(self, outputs: tuple[EngineOutput, ...]) -> None:
        """Outputs that no worker answers for: of a bucket that is served in this process,
        and what a dead worker left unanswered, whose requests have failed."""

    def fail_bucket(self, bucket: int, error: BatonError) -> None:
        """Every request of it that has no end yet; their engine work is cancelled."""


class PostPool:
    def __init__(
        self,
        num_workers: int,
        tokenizer: TokenizerSpec,
        *,
        name: str,
        limits: ExecutorLimits,
        on_pressure: Callable[[bool], bool],
    ) -> None:
        """`on_pressure` hears True when a worker is so far behind that no more outputs should
        be read from the engine, and False when that is over. Where it returns False the
        first time, nobody can wait for that worker, and it is given up."""
        self.num_buckets = num_workers
        self._name = name
        self._on_pressure = on_pressure
        self._loop = asyncio.get_running_loop()
        self._context = new_context()
        settings = PostSettings(
            context=self._context, tokenizer=tokenizer, name=name, limits=limits
        )
        self._buckets = [PostBucket(index, settings, self) for index in range(num_workers)]
        self._client: PostClient | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        answer_s_max = limits.post.answer_s_max
        period_s = min(LOOK_S_MAX, answer_s_max / LOOKS_PER_BOUND)
        self._watch = AnswerWatch(answer_s_max, period_s, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._is_under_pressure = False

    async def start(self, client: PostClient) -> None:
        """Raises ConfigError or EngineDeadError; `stop` is still to be called then."""
        self._client = client
        for bucket in self._buckets:
            bucket.spawn()
        self._look()
        await self._started

    async def stop(self) -> None:
        """Bounded; what does not end leaks and is said. Safe twice."""
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(bucket.stop() for bucket in self._buckets))
        end_context(self._context)  # every socket is closed: it does not wait

    def cut(self) -> None:
        """Where the event loop itself ends: workers are killed, and not waited for."""
        if self._timer is not None:
            self._timer.cancel()
        for bucket in self._buckets:
            bucket.cut()
        end_context(self._context)

    # --- use --------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """In the buckets' order; those that are gone left out."""
        return tuple(bucket.pid for bucket in self._buckets if bucket.pid is not None)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(str(bucket.life.state) for bucket in self._buckets)

    def bucket_of(self, client_id: int) -> int:
        return bucket_of(client_id, self.num_buckets)

    def open(self, client_id: int, params: TextParams) -> bool:
        """Before the request leaves for the engine. False: make its text in this process."""
        return self._buckets[self.bucket_of(client_id)].open(client_id, params)

    def forget(self, client_id: int) -> None:
        """It ended without its worker's last word."""
        self._buckets[self.bucket_of(client_id)].forget(client_id)

    def forward(self, buckets: tuple[tuple[int, bytes], ...]) -> None:
        """What one step of the engine said, grouped and packed by its worker."""
        for index, payload in buckets:
            if not 0 <= index < self.num_buckets:
                logger.error("%s: outputs for bucket %d, which is none", self._name, index)
            elif self._buckets[index].is_in_process:
                self._unpost(payload)
            else:
                self._buckets[index].put(payload)
        self._weigh()

    def counters(self) -> dict[str, int]:
        """Sums over the buckets."""
        total: Counter[str] = Counter()
        for bucket in self._buckets:
            total.update(bucket.counters())
        return dict(total)

    def check(self) -> None:
        """Raises AssertionError where the books of a bucket do not balance."""
        for bucket in self._buckets:
            bucket.check()

    # --- what comes from the buckets ----------------------------------------------

    def on_ready(self) -> None:
        is_all = all(bucket.life.state is BucketState.SERVING for bucket in self._buckets)
        if is_all and not self._started.done():
            self._started.set_result(None)

    def on_answer(self, answer: Answer) -> None:
        self._weigh()
        assert self._client is not None
        self._client.on_answer(answer)

    def on_lost(self, bucket: PostBucket, cause: str, payloads: list[bytes]) -> None:
        """Once all have started, a death costs its bucket's requests; before, the start."""
        if not self._started.done():
            self._started.set_exception(_start_error(bucket.last_words, cause))
            bucket.life.stop()
            return
        assert self._client is not None
        self._client.fail_bucket(bucket.index, PostprocessError(cause))
        for payload in payloads:
            self._unpost(payload)
        self._weigh()

    def _unpost(self, payload: bytes) -> None:
        assert self._client is not None
        try:
            outputs = unpack_outputs(payload)
        except msgspec.MsgspecError:  # authentic, so another version of us
            logger.exception("%s: outputs that cannot be read", self._name)
            return
        self._client.on_unposted(outputs)

    def _weigh(self) -> None:
        """Tell when the pressure begins and ends."""
        is_under_pressure = any(bucket.window.is_full for bucket in self._buckets)
        if is_under_pressure != self._is_under_pressure:
            self._is_under_pressure = is_under_pressure
            can_wait = self._on_pressure(is_under_pressure)
            if is_under_pressure and not can_wait:
                self._give_up_full()

    def _give_up_full(self) -> None:
        for bucket in self._buckets:
            if bucket.window.is_full:
                bucket.give_up("too much waits for it")

    def _look(self) -> None:
        now_s = self._loop.time()
        self._watch.look(now_s)
        for bucket in self._buckets:
            if self._watch.is_overdue(bucket.window.waiting_since_s, now_s):
                bound = f"limit {self._watch.answer_s_max:g} s"
                bucket.give_up(f"it answered nothing for too long ({bound})")
        self._timer = self._loop.call_later(self._watch.period_s, self._look)


def _start_error(words: ErrorData | None, cause: str) -> BatonError:
    if words is not None and words.kind == ConfigError.__name__:
        return from_data(words)
    return EngineDeadError(f"a postprocess worker did not start: {cause}")
