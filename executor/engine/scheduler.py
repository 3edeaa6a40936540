"""The scheduler: which requests hold blocks, and which tokens the next step computes.

State table (the sequence's states are told in sequence.py):

    | event      | WAITING                     | PULLING      | PREFILLING        | DECODING |
    | ---------- | --------------------------- | ------------ | ----------------- | -------- |
    | admitted   | PULLING or PREFILLING       | -            | -                 | -        |
    | pulled     | -                           | DECODING (1) | -                 | -        |
    | computed   | -                           | -            | PREFILLING        | DECODING |
    | appended   | -                           | -            | DECODING          | DECODING |
    | end        | ENDED                       | ENDED        | ENDED             | ENDED    |

    (1) PREFILLING where more than one first token came along; "-" is a defect of ours.

Admission is guaranteed-no-evict: a request is admitted only when every block it
can ever need is reserved with it, all or nothing, so what runs always ends and
two half-admitted requests never wait for each other. Order: requests whose KV
exists elsewhere go before those whose KV does not; inside each class first come,
first served, and one that does not fit yet holds back those behind it. The only
one that is stepped over is a context_only request that the lease cap holds back:
what it waits for is not what the others need. Alone, it passes whatever its size.

Each step runs one token of every decoding sequence, then prefill chunks in order
of admission within the token budget. Pure: the time comes in as a number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from executor.engine.kv_cache import BlockManager, num_blocks_for
from executor.engine.sequence import Sequence, SequenceState
from protos.errors import OverloadedError
from protos.messages import RequestType

RUNNABLE = (SequenceState.PREFILLING, SequenceState.DECODING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_sequences: int
    max_batch_tokens: int
    prefill_chunk_tokens: int
    max_queued: int
    max_leased_blocks: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `sequence.tokens[start : start + num_tokens]`; sample after the last known token."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class Scheduler:
    """See the module's docstring for states and order."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        assert limits.max_batch_tokens >= limits.max_sequences, "decode must fit in one step"
        self.limits = limits
        self.blocks = blocks
        self._queued_with_kv: dict[int, Sequence] = {}
        self._queued: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._may_admit = False
        """Something changed since the last admission found no more to admit."""

    # --- asking -------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queued) + len(self._queued_with_kv)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def find(self, request_id: int) -> Sequence | None:
        for table in (self._running, self._queued_with_kv, self._queued):
            if request_id in table:
                return table[request_id]
        return None

    def sequences(self) -> list[Sequence]:
        """All that have not ended: running ones first, then the queue in its order."""
        return [
            *self._running.values(),
            *self._queued_with_kv.values(),
            *self._queued.values(),
        ]

    def has_work(self) -> bool:
        """Whether a step would do something without further news."""
        if self._may_admit and self.num_queued:
            return True
        return any(sequence.state in RUNNABLE for sequence in self._running.values())

    def expired(self, now_s: float) -> list[Sequence]:
        return [sequence for sequence in self.sequences() if sequence.deadline_s <= now_s]

    def next_deadline_s(self) -> float | None:
        return min((sequence.deadline_s for sequence in self.sequences()), default=None)

    # --- the life of a sequence ---------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises OverloadedError where the queue is full."""
        assert self.find(sequence.request_id) is None, f"{sequence.request_id} is live already"
        if self.num_queued >= self.limits.max_queued:
            raise OverloadedError(
                f"{self.num_queued} requests wait already, the limit is {self.limits.max_queued}",
                field="max_queued",
                value=self.num_queued,
                limit=self.limits.max_queued,
            )
        has_kv = sequence.request_type is RequestType.GENERATION_ONLY
        queue = self._queued_with_kv if has_kv else self._queued
        queue[sequence.request_id] = sequence
        self._may_admit = True

    def end(self, sequence: Sequence) -> None:
        """It leaves in whatever state, and lets go of its blocks."""
        assert sequence.state is not SequenceState.ENDED, f"{sequence.request_id} ended twice"
        for table in (self._running, self._queued_with_kv, self._queued):
            table.pop(sequence.request_id, None)
        self.blocks.release(sequence.holder)
        sequence.state = SequenceState.ENDED
        self._may_admit = True

    def blocks_came_back(self) -> None:
        """A lease or a transfer let go of blocks: admission may succeed now."""
        self._may_admit = True

    # --- admission ----------------------------------------------------------

    def admit(self, now_s: float) -> list[Sequence]:
        """Start what fits. Those that come back as PULLING need their transfer started."""
        admitted: list[Sequence] = []
        if not self._may_admit:
            return admitted
        self._may_admit = False
        for queue in (self._queued_with_kv, self._queued):
            if not self._admit_from(queue, admitted, now_s):
                break
        return admitted

    def _admit_from(
        self, queue: dict[int, Sequence], admitted: list[Sequence], now_s: float
    ) -> bool:
        """False where one did not fit, which holds back all that come after it."""
        for sequence in tuple(queue.values()):
            if len(self._running) >= self.limits.max_sequences:
                return False
            if self._is_held_back_by_leases(sequence):
                continue
            if not self._start(sequence):
                return False
            del queue[sequence.request_id]
            self._running[sequence.request_id] = sequence
            sequence.mark("scheduled", now_s)
            admitted.append(sequence)
        return True

    def _is_held_back_by_leases(self, sequence: Sequence) -> bool:
        if sequence.request_type is not RequestType.CONTEXT_ONLY:
            return False
        num_leased = self.blocks.num_held_by_kind("lease") + sum(
            len(other.block_ids)
            for other in self._running.values()
            if other.request_type is RequestType.CONTEXT_ONLY
        )
        num_own = self._num_blocks(sequence.num_tokens_max)
        return num_leased > 0 and num_leased + num_own > self.limits.max_leased_blocks

    def _start(self, sequence: Sequence) -> bool:
        """Reserve all it can come to need, or nothing."""
        has_kv = sequence.request_type is RequestType.GENERATION_ONLY
        # At least one token must be computed here to get logits, unless a first token came along.
        num_reusable = sequence.num_prompt if has_kv else len(sequence.tokens) - 1
        if sequence.request.return_context_logits:
            num_reusable = 0
        tokens_per_block = self.blocks.tokens_per_block
        matched = self.blocks.match(sequence.hashes[: num_reusable // tokens_per_block])
        num_new = self._num_blocks(sequence.num_tokens_max) - len(matched)
        if not self.blocks.can_reserve(matched, num_new):
            return False
        num_pulled = self._num_blocks(sequence.num_prompt) - len(matched) if has_kv else 0
        writer = transfer_holder(sequence) if has_kv else None
        own = self.blocks.reserve(sequence.holder, matched, num_pulled, writer)
        more = self.blocks.reserve(sequence.holder, (), num_new - num_pulled)
        sequence.block_ids = own + more
        sequence.num_sealed = len(matched)
        sequence.num_cached_tokens = sequence.num_computed = len(matched) * tokens_per_block
        sequence.state = SequenceState.PULLING if has_kv else SequenceState.PREFILLING
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.blocks.tokens_per_block)

    # --- a step -------------------------------------------------------------

    def plan(self) -> list[Chunk]:
        """What the next step computes: decodes first, then prefill chunks."""
        decoding = [
            Chunk(sequence, sequence.num_computed, 1, samples=True)
            for sequence in self._running.values()
            if sequence.state is SequenceState.DECODING
        ]
        return decoding + self._prefill_chunks(self.limits.max_batch_tokens - len(decoding))

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in self._running.values():
            if budget <= 0:
                break
            if sequence.state is not SequenceState.PREFILLING:
                continue
            remaining = sequence.num_to_compute
            num_tokens = min(self.limits.prefill_chunk_tokens, budget, remaining)
            chunks.append(
                Chunk(sequence, sequence.num_computed, num_tokens, num_tokens == remaining)
            )
            budget -= num_tokens
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """The chunk's KV is in its blocks: full blocks are sealed, the last one is begun."""
        sequence = chunk.sequence
        assert sequence.state in RUNNABLE, (sequence.request_id, sequence.state)
        assert chunk.start == sequence.num_computed, (sequence.request_id, chunk.start)
        sequence.num_computed += chunk.num_tokens
        tokens_per_block = self.blocks.tokens_per_block
        while (sequence.num_sealed + 1) * tokens_per_block <= sequence.num_computed:
            index = sequence.num_sealed
            block_hash = sequence.full_block_hash(index, tokens_per_block)
            parent_hash = sequence.parent_hash(index)
            self.blocks.seal(sequence.holder, sequence.block_ids[index], block_hash, parent_hash)
            sequence.num_sealed += 1
        if sequence.num_computed % tokens_per_block:
            self.blocks.fill(sequence.holder, sequence.block_ids[sequence.num_sealed])

    def appended(self, sequence: Sequence, token_id: int) -> None:
        assert sequence.state in RUNNABLE, (sequence.request_id, sequence.state)
        sequence.tokens.append(token_id)
        sequence.state = SequenceState.DECODING

    def pulled(self, sequence: Sequence) -> None:
        """The prompt's KV arrived and was verified; its full blocks are sealed already."""
        assert sequence.state is SequenceState.PULLING, (sequence.request_id, sequence.state)
        sequence.num_computed = sequence.num_prompt
        sequence.num_sealed = sequence.num_prompt // self.blocks.tokens_per_block
        is_one = sequence.num_to_compute == 1
        sequence.state = SequenceState.DECODING if is_one else SequenceState.PREFILLING

    # --- auditing -----------------------------------------------------------

    def sequences_by_state(self) -> dict[str, int]:
        counts = Counter(sequence.state.value for sequence in self.sequences())
        return {state.value: counts[state.value] for state in SequenceState if counts[state.value]}

    def check(self) -> None:
        """Raises AssertionError where tables, states and holders do not fit together."""
        self.blocks.check()
        assert len(self._running) <= self.limits.max_sequences, "too many run"
        assert self.num_queued <= self.limits.max_queued, "too many wait"
        for sequence in (*self._queued.values(), *self._queued_with_kv.values()):
            assert sequence.state is SequenceState.WAITING, (sequence.request_id, sequence.state)
            assert not self.blocks.held_by(sequence.holder), f"{sequence.holder} holds too early"
        for sequence in self._running.values():
            self._check_running(sequence)
        live = {sequence.holder for sequence in self._running.values()}
        for holder in self.blocks.holder_names():
            assert not holder.startswith("sequence:") or holder in live, f"{holder} is gone"

    def _check_running(self, sequence: Sequence) -> None:
        story = (sequence.request_id, sequence.state)
        assert sequence.state in (*RUNNABLE, SequenceState.PULLING), story
        assert self.blocks.held_by(sequence.holder) == sequence.block_ids, story
        assert len(sequence.block_ids) == self._num_blocks(sequence.num_tokens_max), story
        assert sequence.num_computed < len(sequence.tokens), story
        assert sequence.state is not SequenceState.DECODING or sequence.num_to_compute == 1, story


def transfer_holder(sequence: Sequence) -> str:
    return f"transfer:{sequence.request.disagg_request_id}"
