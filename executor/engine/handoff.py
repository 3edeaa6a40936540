"""Hand-offs as the engine sees them: which blocks the data plane may touch, and until when.

Context side, per hand-off:

    offer ─> holder lease:ID ──TransferStarted──> and transfer:ID ──TransferEnded──> lets go
                 └──LeaseEnded──> lets go (a transfer may still hold on)

Generation side:

    start ─> holder transfer:ID, writer of the blocks to fill
                 ├──PullFinished──> full blocks sealed, the last one passed to the sequence
                 └──PullFailed────> lets go, nothing is kept

A sequence that ends during its pull lets go of its own hold at once; the blocks
stay held by the transfer until the data plane says that nothing touches them.
Events for hand-offs no longer known are counted, never an error.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec

from common.hashing import prompt_digest
from executor.engine.kv_cache import BlockManager
from executor.engine.scheduler import transfer_holder
from executor.engine.seam import EngineIdentity
from executor.engine.sequence import Sequence, SequenceState
from kv_transfer.events import (
    LeaseEnded,
    Offer,
    Pull,
    PullFailed,
    PullFinished,
    TransceiverAudit,
    TransceiverEvent,
    TransferEnded,
    TransferStarted,
)
from protos.errors import ErrorData
from protos.messages import ContextPhaseParams, DisaggRequestId, StageTimes, Usage

PULL_TOKEN_BYTES = 16


class KvMover(Protocol):
    """What the engine needs of kv_transfer's Transceiver. None of these waits for a peer."""

    @property
    def address(self) -> bytes: ...

    @property
    def wires(self) -> str: ...

    def offer(self, offer: Offer) -> None: ...

    def pull(self, pull: Pull) -> None: ...

    def abort_pull(self, disagg_request_id: DisaggRequestId) -> None: ...

    def release(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool: ...

    def renew(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool: ...

    def drain_events(self) -> list[TransceiverEvent]: ...

    def audit(self) -> TransceiverAudit: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PullEnd:
    """A sequence's pull ended; `error` is None where its KV is there."""

    sequence: Sequence
    error: ErrorData | None


class Handoffs:
    """See the module's docstring. One for both roles: a server may play each in turn."""

    def __init__(
        self, blocks: BlockManager, mover: KvMover, identity: EngineIdentity, lease_ms: int
    ) -> None:
        self._blocks = blocks
        self._mover = mover
        self._identity = identity
        self._lease_ms = lease_ms
        self._pulls: dict[DisaggRequestId, Sequence] = {}
        self.counters: Counter[str] = Counter()

    def is_known(self, disagg_request_id: DisaggRequestId) -> bool:
        """Whether blocks are still held in this hand-off's name."""
        names = (f"lease:{disagg_request_id}", f"transfer:{disagg_request_id}")
        return any(self._blocks.held_by(name) for name in names) or disagg_request_id in self._pulls

    # --- context side -------------------------------------------------------

    def pin(self, sequence: Sequence) -> None:
        """The lease becomes a holder of the prompt's blocks, before the sequence lets go."""
        for block_id in sequence.block_ids:
            self._blocks.hold(f"lease:{sequence.request.disagg_request_id}", block_id)

    def offer(
        self, sequence: Sequence, usage: Usage, timing: StageTimes, now_s: float
    ) -> ContextPhaseParams:
        """Let the pinned blocks be pulled; what the other side has to know."""
        disagg_request_id = sequence.request.disagg_request_id
        assert disagg_request_id is not None, "intake refuses this"
        pull_token = secrets.token_bytes(PULL_TOKEN_BYTES)
        self._mover.offer(
            Offer(
                disagg_request_id=disagg_request_id,
                pull_token=pull_token,
                block_ids=sequence.block_ids,
                num_tokens=sequence.num_prompt,
                lease_s=self._lease_ms / 1000,
                deadline_s=max(sequence.deadline_s - now_s, 0.0),
            )
        )
        self.counters["leases_offered"] += 1
        layout = self._identity.layout
        return ContextPhaseParams(
            first_token_ids=tuple(sequence.tokens[sequence.num_prompt :]),
            disagg_request_id=disagg_request_id,
            server_name="",  # the service's to fill in: an engine does not know its name
            incarnation=self._identity.incarnation,
            rank_addresses=self._identity.rank_addresses,
            transport=self._identity.transport,
            layout=layout,
            num_prompt_tokens=sequence.num_prompt,
            prompt_digest=prompt_digest(sequence.request.prompt_token_ids),
            block_hashes=tuple(sequence.hashes[: sequence.num_prompt // layout.tokens_per_block]),
            lease_ms=self._lease_ms,
            pull_token=pull_token,
            usage=usage,
            model=self._identity.model_info.limits.model,
            seed=sequence.request.sampling.seed or 0,
            timing=timing,
        )

    # --- generation side ----------------------------------------------------

    def start_pull(self, sequence: Sequence, now_s: float) -> None:
        """Fetch what the prefix cache lacks. Blocks are reserved and held by the transfer."""
        params = sequence.request.context_phase_params
        assert params is not None, "intake refuses this"
        num_blocks = self._identity.layout.num_blocks(sequence.num_prompt)
        positions = tuple(range(sequence.num_sealed, num_blocks))
        self._pulls[params.disagg_request_id] = sequence
        self.counters["pulls_started"] += 1
        self._mover.pull(
            Pull(
                disagg_request_id=params.disagg_request_id,
                pull_token=params.pull_token,
                source_address=params.rank_addresses[0],
                source_incarnation=params.incarnation,
                source_layout=params.layout,
                num_source_blocks=num_blocks,
                block_ids=tuple(sequence.block_ids[position] for position in positions),
                positions=positions,
                num_tokens=sequence.num_prompt - sequence.num_cached_tokens,
                deadline_s=max(sequence.deadline_s - now_s, 0.0),
            )
        )

    def abort_pull(self, sequence: Sequence) -> None:
        """The sequence goes; the transfer holds its blocks until it has really ended."""
        disagg_request_id = sequence.request.disagg_request_id
        assert disagg_request_id is not None, "intake refuses this"
        self.counters["pulls_aborted"] += 1
        self._mover.abort_pull(disagg_request_id)

    # --- events -------------------------------------------------------------

    def handle(self, event: TransceiverEvent) -> PullEnd | None:
        match event:
            case TransferStarted(disagg_request_id):
                self._on_transfer_started(disagg_request_id)
            case TransferEnded(disagg_request_id):
                self._let_go(f"transfer:{disagg_request_id}")
            case LeaseEnded(disagg_request_id, cause):
                self.counters[f"leases_{cause}"] += 1
                self._let_go(f"lease:{disagg_request_id}")
            case PullFinished():
                return self._on_pull_finished(event)
            case PullFailed():
                return self._on_pull_failed(event)
            case _:
                assert_never(event)
        return None

    def _on_transfer_started(self, disagg_request_id: DisaggRequestId) -> None:
        leased = self._blocks.held_by(f"lease:{disagg_request_id}")
        if not leased:
            self.counters["late_events"] += 1
        for block_id in leased:
            self._blocks.hold(f"transfer:{disagg_request_id}", block_id)

    def _let_go(self, holder: str) -> None:
        if not self._blocks.release(holder):
            self.counters["late_events"] += 1

    def _on_pull_finished(self, event: PullFinished) -> PullEnd | None:
        sequence = self._pulls.pop(event.disagg_request_id, None)
        if sequence is None:
            self.counters["late_events"] += 1
            return None
        self.counters["pulls_finished"] += 1
        # Verified blocks are worth keeping even where their sequence is gone by now.
        self._take_over(sequence)
        sequence.kv = msgspec.structs.replace(
            event.stats, reused_tokens=sequence.num_cached_tokens, recomputed_tokens=0
        )
        return PullEnd(sequence, None) if sequence.state is SequenceState.PULLING else None

    def _take_over(self, sequence: Sequence) -> None:
        """Seal what is full; what is not, the sequence goes on writing."""
        writer = transfer_holder(sequence)
        num_full = sequence.num_prompt // self._blocks.tokens_per_block
        for index in range(sequence.num_sealed, num_full):
            block_id, block_hash = sequence.block_ids[index], sequence.hashes[index]
            self._blocks.seal(writer, block_id, block_hash, sequence.parent_hash(index))
        is_partial = sequence.num_prompt % self._blocks.tokens_per_block
        if is_partial and sequence.state is SequenceState.PULLING:
            self._blocks.fill(writer, sequence.block_ids[num_full])
            self._blocks.pass_writer(writer, sequence.block_ids[num_full], sequence.holder)
        self._blocks.release(writer)

    def _on_pull_failed(self, event: PullFailed) -> PullEnd | None:
        sequence = self._pulls.pop(event.disagg_request_id, None)
        if sequence is None:
            self.counters["late_events"] += 1
            return None
        self.counters["pulls_failed"] += 1
        self._blocks.release(transfer_holder(sequence))
        is_waited_for = sequence.state is SequenceState.PULLING
        return PullEnd(sequence, event.error) if is_waited_for else None

    # --- auditing -----------------------------------------------------------

    def check(self) -> None:
        """Every pull's blocks are held; every transfer's holder has a pull or was leased."""
        for disagg_request_id, sequence in self._pulls.items():
            pulled = sequence.num_prompt > sequence.num_cached_tokens
            holds = self._blocks.held_by(f"transfer:{disagg_request_id}")
            assert bool(holds) == pulled, f"the pull {disagg_request_id} holds {holds}"
