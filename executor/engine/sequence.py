"""One request as the engine knows it: its tokens, its blocks, its clock.

States (moved by the scheduler alone):

    | state      | means                                        | next                    |
    | ---------- | -------------------------------------------- | ----------------------- |
    | WAITING    | queued; holds nothing                        | PULLING, PREFILLING, ENDED |
    | PULLING    | blocks reserved, their KV is under way       | DECODING, ENDED         |
    | PREFILLING | blocks reserved, known tokens being computed | DECODING, ENDED         |
    | DECODING   | one token a step                             | ENDED                   |
    | ENDED      | holds nothing                                |                         |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from common.hashing import block_hash
from executor.engine.seam import EngineRequest
from protos.messages import KvStats, RequestType
from protos.tokens import pack_token_ids


class SequenceState(enum.StrEnum):
    WAITING = "waiting"
    PULLING = "pulling"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt and completion; the KV of the first `num_computed` exists."""

    request: EngineRequest
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    hashes: list[bytes]
    """Of the full blocks known so far: the prompt's at first, more as decode fills them."""
    root: bytes
    arrived_s: float
    deadline_s: float
    """On the engine's clock."""
    state: SequenceState = SequenceState.WAITING
    block_ids: tuple[int, ...] = ()
    num_computed: int = 0
    num_sealed: int = 0
    num_cached_tokens: int = 0
    """Known tokens whose KV the prefix cache already had."""
    num_streamed_before: int = 0
    """Completion tokens that came with the request; not streamed again."""
    kv: KvStats = field(default_factory=KvStats)
    marks: dict[str, float] = field(default_factory=dict)
    """Named instants on the engine's clock: scheduled, first_token, pulled."""

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def request_type(self) -> RequestType:
        return self.request.request_type

    @property
    def holder(self) -> str:
        return f"sequence:{self.request.request_id}"

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Known tokens without KV. One of them while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_tokens_max(self) -> int:
        """Tokens whose KV this sequence can come to need; the last one sampled needs none."""
        if self.request_type is RequestType.CONTEXT_ONLY:
            return self.num_prompt
        return self.num_prompt + self.max_tokens - 1

    def mark(self, name: str, now_s: float) -> None:
        """Note an instant; only the first of a name counts."""
        self.marks.setdefault(name, now_s)

    def full_block_hash(self, index: int, tokens_per_block: int) -> bytes:
        """The hash of the full block `index`; the chain grows as decode fills blocks."""
        while len(self.hashes) <= index:
            start = len(self.hashes) * tokens_per_block
            packed = pack_token_ids(self.tokens[start : start + tokens_per_block])
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(block_hash(parent, packed))
        return self.hashes[index]

    def parent_hash(self, index: int) -> bytes:
        """Of the block before the full block `index`."""
        return self.hashes[index - 1] if index else self.root
