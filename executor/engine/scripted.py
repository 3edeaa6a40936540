"""The scripted engine: the Engine seam without a model, for tests and drills.

Tokens are a pure function of prompt ids, seed and position, so any topology
must stream the same ones. Queueing, blocks, leases, deadlines and aborts are
real bookkeeping; the KV transfer is not: `generation_only` checks the params and
reports the blocks as transferred, and a lease ends by release or expiry.

A sequence waits, runs (one token a step), and ends by one output.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable

from executor.config import EngineConfig, ScriptedConfig
from executor.engine.control_base import Gauges
from executor.engine.control_seam import EngineControl
from executor.engine.scripted_control import Chain, ScriptedBlocks, ScriptedControl
from executor.engine.scripted_model import (
    check_scripted,
    invalid,
    scripted_identity,
    scripted_token,
    stamp,
)
from executor.engine.scripted_pool import Lease, ScriptedPool
from executor.engine.scripted_sequence import (
    ScriptedSequence,
    deadline_exceeded,
    finish_of,
    make_sequence,
    offer_of,
)
from executor.engine.seam import (
    EngineAudit,
    EngineFinish,
    EngineIdentity,
    EngineOutput,
    EngineRequest,
)
from protos.errors import (
    BatonError,
    ConfigError,
    DuplicateRequestError,
    OverloadedError,
    RequestCancelledError,
)
from protos.messages import DisaggRequestId, FinishReason, Load, RequestType
from protos.tokens import unpack_token_ids


class ScriptedEngine:
    """See the module's docstring. `wake` is never needed: nothing happens behind its back."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._script: ScriptedConfig = config.scripted
        self._clock = clock
        self._sleep = sleep
        self._pretend_to_load()
        if self._script.load_error:
            raise ConfigError(self._script.load_error, field="scripted.load_error")
        self._pool = ScriptedPool(
            config.kv_cache.num_blocks,
            config.kv_cache.leased_share_max,
            on_lease_ended=lambda lease: self._blocks.let_go(lambda: lease.chain),
        )
        self._waiting: deque[ScriptedSequence] = deque()
        self._running: dict[int, ScriptedSequence] = {}
        self._sequences: dict[int, ScriptedSequence] = {}
        self._num_doomed = 0
        self._load_sequence = 0
        self._num_steps = 0
        self._counters: dict[str, int] = {}
        self._reset_counters()
        self._identity = scripted_identity(config)
        self._blocks = ScriptedBlocks(self._identity.layout.tokens_per_block, self._chains)
        self._control = ScriptedControl(
            blocks=self._blocks,
            holders=self._holders,
            load=self._pretend_to_load,
            reset=self._reset_counters,
            gauges=self._gauges,
            clock=clock,
        )

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def control(self) -> EngineControl:
        return self._control

    def submit(self, request: EngineRequest) -> None:
        self._control.check_awake()
        prompt = unpack_token_ids(request.prompt_token_ids)
        self._check_submit(request, prompt)
        sequence = make_sequence(request, prompt, self._clock())
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        self._counters["submitted"] += 1

    def abort(self, request_id: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._doom(sequence, RequestCancelledError("the request was cancelled"))

    def release(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return self._pool.release(disagg_request_id, pull_token)

    def renew(self, disagg_request_id: DisaggRequestId, pull_token: bytes) -> bool:
        return self._pool.renew(disagg_request_id, pull_token, self._clock())

    @property
    def progress(self) -> int:
        return self._num_steps

    def has_work(self) -> bool:
        if self._running or self._num_doomed or (self._waiting and self._can_admit()):
            return True
        due_s = self.next_deadline_s()
        return due_s is not None and due_s <= 0

    def next_deadline_s(self) -> float | None:
        ends = [sequence.ends_at_s for sequence in self._sequences.values()]
        lease_ends_at_s = self._pool.next_expiry_s()
        if lease_ends_at_s is not None:
            ends.append(lease_ends_at_s)
        due_s = self._control.next_due_s(min(ends, default=None))
        return None if due_s is None else max(due_s - self._clock(), 0.0)

    def step(self) -> list[EngineOutput]:
        self._num_steps += 1
        if self._control.is_watching:
            return self._watched_step()
        return self._prepare() + self._run()

    def _watched_step(self) -> list[EngineOutput]:
        began_s = self._clock()
        outputs = self._prepare()
        to_prefill = [sequence.num_to_prefill for sequence in self._running.values()]
        outputs += self._run()
        self._control.stepped(
            step_index=self._num_steps,
            began_s=began_s,
            num_outputs=len(outputs),
            num_finished=sum(o.finish is not None or o.error is not None for o in outputs),
            num_prefill_tokens=sum(to_prefill),
            num_decode_tokens=to_prefill.count(0),
        )
        return outputs

    def _prepare(self) -> list[EngineOutput]:
        """End what is over, admit what fits."""
        now_s = self._clock()
        self._pool.expire(now_s)
        outputs = self._end_doomed(now_s)
        while self._waiting and self._can_admit():
            self._admit(now_s)
        return outputs

    def _run(self) -> list[EngineOutput]:
        """One token of every running sequence."""
        if self._running and self._script.step_ms:
            self._sleep(self._script.step_ms / 1000)
        outputs = [self._advance(sequence) for sequence in list(self._running.values())]
        if self._script.stamps_tokens:
            stamp(outputs, self._clock(), self._script.vocab_size)
        return outputs

    def load(self) -> Load:
        self._load_sequence += 1
        live = self._sequences.values()
        return Load(
            num_queued=len(self._waiting),
            num_running=len(self._running),
            tokens_in_flight=sum(len(s.prompt) + s.position for s in live),
            blocks_free=self._pool.num_free,
            blocks_total=self._pool.num_blocks,
            sequence=self._load_sequence,
        )

    def audit(self) -> EngineAudit:
        self.check()
        num_free = self._pool.num_free
        return EngineAudit(
            blocks_by_state={
                "free": num_free,
                "reserved": 0,
                "live": self._pool.num_blocks - num_free,
                "cached": 0,
            },
            blocks_by_owner=self._pool.blocks_by_owner(),
            holders=self._pool.holders(),
            sequences_by_state={"waiting": len(self._waiting), "running": len(self._running)},
            counters={
                **self._counters,
                "steps": self._num_steps,
                **self._pool.counters,
                **self._control.counters(),
            },
        )

    def check(self) -> None:
        """Raises AssertionError where sequences and blocks do not fit each other."""
        self._pool.check()
        self._blocks.check()
        assert len(self._waiting) + len(self._running) == len(self._sequences)
        held = sum(len(sequence.block_ids) for sequence in self._running.values())
        assert held == self._pool.blocks_by_owner()["sequence"]
        assert self._num_doomed == sum(s.error is not None for s in self._sequences.values())

    def close(self) -> None:
        self._control.close()
        self._blocks.listen(False)
        for sequence in self._running.values():
            self._pool.give_back(sequence.block_ids)
        self._running.clear()
        self._waiting.clear()
        self._sequences.clear()
        self._num_doomed = 0
        self._pool.close()

    # --- for the control ------------------------------------------------------

    def _pretend_to_load(self) -> None:
        self._sleep(self._script.load_ms / 1000)

    def _reset_counters(self) -> None:
        self._counters = {"submitted": 0, "finished": 0, "failed": 0}

    def _gauges(self) -> Gauges:
        return Gauges(
            num_queued=len(self._waiting),
            num_running=len(self._running),
            blocks_free=self._pool.num_free,
            blocks_total=self._pool.num_blocks,
        )

    def _holders(self) -> list[str]:
        sequences = [f"sequence:{request_id}" for request_id in self._sequences]
        return sequences + [f"lease:{disagg_id}" for disagg_id in self._pool.leases()]

    def _chains(self) -> list[Chain]:
        """Of every request and lease that holds blocks."""
        layout = self._identity.layout
        running = [sequence.chain(layout) for sequence in self._running.values()]
        return running + [lease.chain for lease in self._pool.leases().values()]

    # --- admission ------------------------------------------------------------

    def _check_submit(self, request: EngineRequest, prompt: tuple[int, ...]) -> None:
        check_scripted(request, prompt, self._identity, self._script)
        if len(self._waiting) >= self._config.scheduler.max_queued:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait already",
                field="scheduler.max_queued",
                limit=self._config.scheduler.max_queued,
            )
        if request.request_type is RequestType.CONTEXT_ONLY:
            self._check_context_only(request, len(prompt))

    def _check_context_only(self, request: EngineRequest, num_tokens: int) -> None:
        disagg_id = request.disagg_request_id
        if disagg_id is None:
            raise invalid("disagg_request_id", "absent", "given in a context_only request")
        if self._pool.has_lease(disagg_id):
            raise DuplicateRequestError(
                f"the hand-off {disagg_id} has a lease already", field="disagg_request_id"
            )
        if self._pool.was_released(disagg_id):
            raise RequestCancelledError(
                f"the hand-off {disagg_id} was released before it came",
                field="disagg_request_id",
            )
        num_blocks = self._identity.layout.num_blocks(num_tokens)
        if num_blocks > self._pool.leased_blocks_max:
            raise invalid(
                "prompt", f"{num_blocks} blocks", f"at most {self._pool.leased_blocks_max} blocks"
            )

    def _blocks_needed(self, sequence: ScriptedSequence) -> int:
        num_tokens = len(sequence.prompt)
        if not sequence.is_context_only:
            num_tokens += sequence.max_tokens
        return self._identity.layout.num_blocks(num_tokens)

    def _can_admit(self) -> bool:
        if len(self._running) >= self._config.scheduler.max_sequences:
            return False
        num_blocks = self._blocks_needed(self._waiting[0])
        if not self._waiting[0].is_context_only:
            return self._pool.can_take(num_blocks)
        promised = sum(len(s.block_ids) for s in self._running.values() if s.is_context_only)
        return self._pool.can_take(num_blocks, num_to_lease=num_blocks + promised)

    def _admit(self, now_s: float) -> None:
        sequence = self._waiting.popleft()
        request_id = sequence.request.request_id
        holder = f"sequence:{request_id}"
        sequence.block_ids = self._pool.take(self._blocks_needed(sequence), holder)
        sequence.scheduled_ms = (now_s - sequence.submitted_at_s) * 1000
        self._running[request_id] = sequence
        self._blocks.hold(lambda: sequence.chain(self._identity.layout))

    # --- running --------------------------------------------------------------

    def _advance(self, sequence: ScriptedSequence) -> EngineOutput:
        self._drill(sequence.prompt[-1])
        sampling = sequence.request.sampling
        token_index = sequence.position
        token_id = scripted_token(
            sequence.digest, sampling.seed or 0, token_index, self._script.vocab_size
        )
        sequence.position += 1
        if sequence.position == sequence.first_position + 1:
            sequence.first_token_ms = (self._clock() - sequence.submitted_at_s) * 1000
        return EngineOutput(
            request_id=sequence.request.request_id,
            token_index=token_index,
            token_ids=(token_id,),
            finish=self._finish_after(sequence, token_id),
        )

    def _drill(self, token_id: int) -> None:
        if token_id == self._script.crash_token_id:
            raise RuntimeError("scripted: the engine crashes in this step")
        if token_id == self._script.exit_token_id:
            os._exit(9)
        if token_id == self._script.hang_token_id:
            self._sleep(self._script.hang_s)

    def _finish_after(self, sequence: ScriptedSequence, token_id: int) -> EngineFinish | None:
        sampling = sequence.request.sampling
        is_eos = token_id in self._script.eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return self._finish(sequence, FinishReason.STOP, stop_token_id=token_id)
        if sequence.is_context_only:
            return self._finish_context(sequence, token_id)
        if sequence.position >= sequence.max_tokens:
            return self._finish(sequence, FinishReason.LENGTH)
        return None

    def _finish_context(self, sequence: ScriptedSequence, token_id: int) -> EngineFinish:
        request, now_s = sequence.request, self._clock()
        disagg_id = request.disagg_request_id
        assert disagg_id is not None  # checked at submit
        lease_s = self._config.transfer.lease_ms / 1000
        lease = Lease(
            pull_token=secrets.token_bytes(16),
            block_ids=sequence.block_ids,
            chain=sequence.chain(self._identity.layout),
            lease_s=lease_s,
            ends_at_s=min(now_s + lease_s, sequence.ends_at_s),
            request_ends_at_s=sequence.ends_at_s,
        )
        self._pool.lease(disagg_id, lease)
        sequence.block_ids = ()
        finish = self._finish(sequence, FinishReason.CONTEXT)
        params = offer_of(sequence, token_id, lease, self._identity, finish)
        return EngineFinish(
            reason=finish.reason,
            usage=finish.usage,
            timing=finish.timing,
            context_phase_params=params,
        )

    # --- ending ---------------------------------------------------------------

    def _doom(self, sequence: ScriptedSequence, error: BatonError) -> None:
        if sequence.error is None:
            sequence.error = error
            self._num_doomed += 1

    def _end_doomed(self, now_s: float) -> list[EngineOutput]:
        for sequence in self._sequences.values():
            if sequence.ends_at_s <= now_s:
                self._doom(sequence, deadline_exceeded(sequence))
        if not self._num_doomed:
            return []
        return [self._end_with_error(s) for s in list(self._sequences.values()) if s.error]

    def _end_with_error(self, sequence: ScriptedSequence) -> EngineOutput:
        error = sequence.error
        assert error is not None
        finish = self._finish(sequence, FinishReason.STOP)
        return EngineOutput(
            request_id=sequence.request.request_id,
            token_index=sequence.position,
            finish=finish if isinstance(error, RequestCancelledError) else None,
            error=error.to_data(),
        )

    def _finish(
        self, sequence: ScriptedSequence, reason: FinishReason, stop_token_id: int | None = None
    ) -> EngineFinish:
        """Forget the sequence, free what it holds, and say what it used."""
        request_id = sequence.request.request_id
        del self._sequences[request_id]
        if self._running.pop(request_id, None) is None:
            self._waiting.remove(sequence)
        if sequence.error is not None:
            self._num_doomed -= 1
        self._pool.give_back(sequence.block_ids)
        if sequence.block_ids:
            self._blocks.let_go(lambda: sequence.chain(self._identity.layout))
        self._counters["failed" if sequence.error else "finished"] += 1
        return finish_of(sequence, reason, stop_token_id, self._identity.layout, self._clock())
