"""One request in the scripted engine, and what it is told when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.hashing import block_hashes, prompt_digest, root_hash
from executor.engine.scripted_control import Chain
from executor.engine.scripted_model import TRANSPORT
from executor.engine.scripted_pool import Lease
from executor.engine.seam import EngineFinish, EngineIdentity, EngineRequest
from protos.errors import BatonError, DeadlineExceededError
from protos.messages import (
    ContextPhaseParams,
    FinishReason,
    KvLayout,
    KvStats,
    RequestType,
    StageTimes,
    Usage,
)
from protos.tokens import TOKEN_BYTES


@dataclass(slots=True)
class ScriptedSequence:
    request: EngineRequest
    prompt: tuple[int, ...]
    digest: bytes
    position: int
    """Completion tokens that exist, those that came with the request included."""
    first_position: int
    submitted_at_s: float
    ends_at_s: float
    block_ids: tuple[int, ...] = ()
    scheduled_ms: float = 0.0
    first_token_ms: float = 0.0
    error: BatonError | None = field(default=None)
    """Set by an abort or an expired deadline: the next step ends it."""

    @property
    def max_tokens(self) -> int:
        assert self.request.sampling.max_tokens is not None
        return self.request.sampling.max_tokens

    @property
    def is_context_only(self) -> bool:
        return self.request.request_type is RequestType.CONTEXT_ONLY

    @property
    def num_to_prefill(self) -> int:
        """Tokens that its first step stands for; every other one computes a single token."""
        is_first = self.position == self.first_position
        return len(self.prompt) + self.position if is_first else 0

    def chain(self, layout: KvLayout) -> Chain:
        """The root and the hashes of the prompt's full blocks."""
        root = root_hash(layout.model_fingerprint, self.request.cache_salt)
        return (root, *block_hashes(self.request.prompt_token_ids, layout.tokens_per_block, root))


def make_sequence(
    request: EngineRequest, prompt: tuple[int, ...], now_s: float
) -> ScriptedSequence:
    params = request.context_phase_params
    first_position = len(params.first_token_ids) if params else 0
    first_position += len(request.output_prefix_token_ids) // TOKEN_BYTES
    return ScriptedSequence(
        request=request,
        prompt=prompt,
        digest=prompt_digest(request.prompt_token_ids),
        position=first_position,
        first_position=first_position,
        submitted_at_s=now_s,
        ends_at_s=now_s + request.deadline_s,
    )


def finish_of(
    sequence: ScriptedSequence,
    reason: FinishReason,
    stop_token_id: int | None,
    layout: KvLayout,
    now_s: float,
) -> EngineFinish:
    is_generation_only = sequence.request.request_type is RequestType.GENERATION_ONLY
    return EngineFinish(
        reason=reason,
        stop_token_id=stop_token_id,
        usage=Usage(
            prompt_tokens=0 if is_generation_only else len(sequence.prompt),
            completion_tokens=sequence.position - sequence.first_position,
        ),
        kv=_kv_stats(sequence, layout) if is_generation_only else KvStats(),
        timing=StageTimes(
            scheduled_ms=sequence.scheduled_ms,
            first_token_ms=sequence.first_token_ms,
            finished_ms=(now_s - sequence.submitted_at_s) * 1000,
        ),
    )


def _kv_stats(sequence: ScriptedSequence, layout: KvLayout) -> KvStats:
    num_blocks = layout.num_blocks(len(sequence.prompt))
    return KvStats(
        transferred_tokens=len(sequence.prompt),
        transferred_blocks=num_blocks,
        transferred_bytes=num_blocks * layout.block_bytes,
        transport=TRANSPORT,
    )


def offer_of(
    sequence: ScriptedSequence,
    token_id: int,
    lease: Lease,
    identity: EngineIdentity,
    finish: EngineFinish,
) -> ContextPhaseParams:
    """What the other side has to know of a finished context phase."""
    request = sequence.request
    assert request.disagg_request_id is not None  # checked at submit
    return ContextPhaseParams(
        first_token_ids=(token_id,),
        disagg_request_id=request.disagg_request_id,
        server_name="",
        incarnation=identity.incarnation,
        rank_addresses=identity.rank_addresses,
        transport=TRANSPORT,
        layout=identity.layout,
        num_prompt_tokens=len(sequence.prompt),
        prompt_digest=sequence.digest,
        block_hashes=lease.chain[1:],
        lease_ms=round(lease.lease_s * 1000),
        pull_token=lease.pull_token,
        usage=finish.usage,
        model=identity.model_info.limits.model,
        seed=request.sampling.seed or 0,
        timing=finish.timing,
    )


def deadline_exceeded(sequence: ScriptedSequence) -> DeadlineExceededError:
    allowed_s = sequence.request.deadline_s
    return DeadlineExceededError(
        f"the request did not end within its deadline of {allowed_s:g} s",
        field="deadline_ms",
        value=round(allowed_s * 1000),
    )
