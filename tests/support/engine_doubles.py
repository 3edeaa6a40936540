"""A runner and a data plane driven by hand, for the engine's core without torch or UCX."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from executor.engine.answers import not_finite
from executor.engine.control import RankFacts
from executor.engine.core import EngineCore, News
from executor.engine.kv_cache import BlockManager
from executor.engine.profiles import StepTracer
from executor.engine.runner_seam import ChunkResult
from executor.engine.scheduler import Chunk, Scheduler, SchedulerLimits
from executor.engine.seam import EngineIdentity
from kv_transfer.events import Offer, Pull, TransceiverAudit, TransceiverEvent
from protos.messages import DisaggRequestId, KvLayout, ModelInfo, ModelLimits

VOCAB_SIZE = 5000
LAYOUT = KvLayout(
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    tokens_per_block=4,
    model_fingerprint="double",
)


def next_token(tokens: Sequence[int]) -> int:
    """The double's model: a function of all tokens before."""
    digest = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def completion(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class HandRunner:
    """Answers like `next_token`; keeps the last step's chunks to be looked at.

    `bad_prompts` are first prompt tokens of requests whose logits are not finite.
    """

    def __init__(self) -> None:
        self.last: list[Chunk] = []
        self.num_runs = 0
        self.bad_prompts: list[int] = []
        self.is_loaded = True

    @property
    def progress(self) -> int:
        return self.num_runs

    def run(self, chunks: list[Chunk]) -> list[ChunkResult]:
        assert self.is_loaded, "run asleep"
        self.last = chunks
        self.num_runs += 1
        return [self._result(chunk) if chunk.samples else ChunkResult() for chunk in chunks]

    def _result(self, chunk: Chunk) -> ChunkResult:
        tokens = chunk.sequence.tokens
        if tokens[0] in self.bad_prompts:
            return ChunkResult(error=not_finite())
        return ChunkResult(next_token(tokens))

    def check_release(self) -> None:
        """It always can."""

    def release(self) -> None:
        self.is_loaded = False

    def restore(self) -> None:
        self.is_loaded = True


class HandMover:
    """Events are put in by the test; offers and pulls are kept until the test ends them."""

    address = b"hand"
    wires = "hand"

    def __init__(self, news: News) -> None:
        self._news = news
        self._events: list[TransceiverEvent] = []
        self.offers: dict[DisaggRequestId, Offer] = {}
        self.pulls: dict[DisaggRequestId, Pull] = {}
        self.aborted: list[DisaggRequestId] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.offers or self.pulls)

    def put(self, event: TransceiverEvent) -> None:
        self._events.append(event)
        self._news.raise_flag()

    def offer(self, offer: Offer) -> None:
        self.offers[offer.disagg_request_id] = offer

    def pull(self, pull: Pull) -> None:
        self.pulls[pull.disagg_request_id] = pull

    def abort_pull(self, disagg_request_id: DisaggRequestId) -> None:
        self.aborted.append(disagg_request_id)

    def release(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return disagg_request_id in self.offers

    def renew(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return disagg_request_id in self.offers

    def drain_events(self) -> list[TransceiverEvent]:
        events, self._events = self._events, []
        return events

    def audit(self) -> TransceiverAudit:
        return TransceiverAudit(leases=len(self.offers), pulls=len(self.pulls))

    def close(self) -> None:
        self._events.clear()


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class HandEngine:
    """An EngineCore and its doubles."""

    def __init__(
        self,
        *,
        num_blocks: int = 24,
        max_sequences: int = 4,
        max_batch_tokens: int = 12,
        prefill_chunk_tokens: int = 6,
        max_queued: int = 8,
        max_leased_blocks: int = 12,
    ) -> None:
        news = News(lambda: None)
        self.mover = HandMover(news)
        self.runner = HandRunner()
        self.clock = HandClock()
        self.limits = SchedulerLimits(
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_queued=max_queued,
            max_leased_blocks=max_leased_blocks,
        )
        room = num_blocks * LAYOUT.tokens_per_block
        self.core = EngineCore(
            identity=EngineIdentity(
                incarnation=1,
                model_info=ModelInfo(
                    limits=ModelLimits(
                        model="double",
                        vocab_size=VOCAB_SIZE,
                        max_prompt_tokens=room - 1,
                        max_total_tokens=room,
                    ),
                    dtype="float32",
                    num_parameters=0,
                    architecture="double",
                ),
                layout=LAYOUT,
                transport="hand",
                rank_addresses=(b"hand",),
                wires="hand",
                num_blocks=num_blocks,
            ),
            scheduler=Scheduler(self.limits, BlockManager(num_blocks, LAYOUT.tokens_per_block)),
            runner=self.runner,
            mover=self.mover,
            news=news,
            facts=RankFacts(rank=0, engine="double", device="none"),
            tracer=StepTracer("double"),
            lease_ms=1000,
            clock=self.clock,
        )
