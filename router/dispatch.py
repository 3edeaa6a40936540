"""One request's way through its legs, as a table: (state, event) -> effects.

Pure, one instance per request. Its states:

    new ──Started──> context ──hand-off──> handoff ──first token──> generation ──> done
     │                  └──the first token ends it / failure / interrupt──────────> done
     └──Started──> whole ─────────────────────────────────────────────────────────> done

`handoff` is the time between the legs: the generation leg is called, nothing came
back yet, and the context side's lease is ours to renew and, whatever goes wrong,
to release. With the generation leg's first token the lease is its.

Exactly one terminal effect (`Finish` or `Fail`) leaves a machine, with the step
that enters `done`. What comes for a leg that has ended is late: counted and
dropped. An event that cannot be raises InternalError with the story so far.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from protos.errors import InternalError
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    Finish,
    FinishReason,
    GenerateChunk,
    StageTimes,
)
from router import signals as sig
from router.merge import (
    Continuity,
    finish_of,
    handoff_fault,
    merge_finishes,
    whole_fault,
)
from router.signals import Effect, Event, Leg

STORY_LENGTH_MAX = 16


class State(enum.StrEnum):
    NEW = "new"
    CONTEXT = "context"
    HANDOFF = "handoff"
    GENERATION = "generation"
    WHOLE = "whole"
    DONE = "done"


Effects = list[Effect]


class Dispatch:
    def __init__(
        self,
        external_id: str,
        *,
        disagg_request_id: DisaggRequestId | None,
        seed: int,
    ) -> None:
        """`disagg_request_id` None: one server answers the whole request."""
        self.state = State.NEW
        self.num_late = 0
        self._external_id = external_id
        self.disagg_request_id = disagg_request_id
        self._seed = seed
        self._is_first_emitted = False
        self._continuity = Continuity()
        self._leg: Leg | None = None
        self._lease: sig.Lease | None = None
        self._is_renewing = False
        self._context_finish: Finish | None = None
        self._context_times = StageTimes()
        self._story: list[str] = []

    @property
    def is_done(self) -> bool:
        return self.state is State.DONE

    def handle(self, event: Event) -> Effects:
        """One step. Raises InternalError for an event that cannot come in this state."""
        handler = TABLE.get((self.state, type(event)))
        if handler is None:
            raise InternalError(
                f"{type(event).__name__} cannot come in state {self.state}; the story of "
                f"{self._external_id!r}: {' '.join(self._story)}"
            )
        before = self.state
        effects = handler(self, event)
        if before is not self.state and len(self._story) < STORY_LENGTH_MAX:
            self._story.append(f"{before}-{type(event).__name__}->{self.state}")
        return effects

    # --- steps ------------------------------------------------------------------

    def _start(self, _: sig.Started) -> Effects:
        if self.disagg_request_id is None:
            self.state, self._leg = State.WHOLE, Leg.WHOLE
            return [sig.CallWhole()]
        self.state, self._leg = State.CONTEXT, Leg.CONTEXT
        return [sig.CallContext()]

    def _chunk(self, event: sig.ContextChunk | sig.GenerationChunk | sig.WholeChunk) -> Effects:
        fault = self._continuity.fault_in(event.chunk)
        if fault is not None:
            return self._end(sig.Fail(fault))
        return self._emit(event.chunk)

    def _context_finished(self, event: sig.ContextFinished) -> Effects:
        freed = self._leg_ended()
        params, finish = event.params, finish_of(event.chunk)
        if params is not None:
            self._lease = sig.Lease(params.disagg_request_id, params.pull_token, params.lease_ms)
        fault = self._continuity.fault_in(event.chunk) or handoff_fault(
            finish, params, self.disagg_request_id
        )
        if fault is not None:
            return freed + self._end(sig.Fail(fault))
        if finish.reason is not FinishReason.CONTEXT:
            return freed + self._end(sig.Finish(self._outgoing(event.chunk, finish)))
        return freed + self._hand_off(event.chunk, finish, params)

    def _hand_off(
        self, chunk: GenerateChunk, finish: Finish, params: ContextPhaseParams | None
    ) -> Effects:
        signed = chunk.context_phase_params
        assert params is not None, "handoff_fault saw to it"
        assert signed is not None
        assert self._lease is not None
        self._context_finish, self._context_times = finish, params.timing
        self.state, self._leg, self._is_renewing = State.HANDOFF, Leg.GENERATION, True
        calls: Effects = [sig.CallGeneration(signed), sig.StartRenewing(self._lease)]
        return calls + self._emit(chunk)

    def _first_generation_chunk(self, event: sig.GenerationChunk) -> Effects:
        if not event.chunk.token_ids:
            return self._chunk(event)  # no token yet: the KV may still be on its way
        return self._taken_over() + self._chunk(event)

    def _generation_finished(self, event: sig.GenerationFinished) -> Effects:
        taken = self._taken_over() + self._leg_ended()
        fault = self._continuity.fault_in(event.chunk) or whole_fault(event.chunk)
        if fault is not None:
            return taken + self._end(sig.Fail(fault))
        assert self._context_finish is not None, "generation ran without a context phase"
        finish = merge_finishes(self._context_finish, self._context_times, finish_of(event.chunk))
        return taken + self._end(sig.Finish(self._outgoing(event.chunk, finish)))

    def _whole_finished(self, event: sig.WholeFinished) -> Effects:
        freed = self._leg_ended()
        fault = self._continuity.fault_in(event.chunk) or whole_fault(event.chunk)
        if fault is not None:
            return freed + self._end(sig.Fail(fault))
        chunk = self._outgoing(event.chunk, finish_of(event.chunk))
        return freed + self._end(sig.Finish(chunk))

    def _leg_failed(self, event: sig.LegFailed) -> Effects:
        return self._leg_ended() + self._end(sig.Fail(event.error))

    def _interrupted(self, event: sig.Interrupt) -> Effects:
        return self._end(sig.Fail(sig.interrupt_error(event)))

    def _late(self, _: Event) -> Effects:
        self.num_late += 1
        return []

    # --- what steps are made of -------------------------------------------------

    def _emit(self, chunk: GenerateChunk) -> Effects:
        if not chunk.token_ids and not chunk.text:
            return []
        return [sig.Emit(self._outgoing(chunk, None))]

    def _outgoing(self, chunk: GenerateChunk, finish: Finish | None) -> GenerateChunk:
        """The chunk as the client sees it: our id, the seed once, nothing internal."""
        seed = 0 if self._is_first_emitted else self._seed
        self._is_first_emitted = True
        return GenerateChunk(
            external_id=self._external_id,
            token_index=chunk.token_index,
            token_ids=chunk.token_ids,
            text=chunk.text,
            text_offset=chunk.text_offset,
            finish=finish,
            seed=seed,
        )

    def _leg_ended(self) -> Effects:
        leg, self._leg = self._leg, None
        assert leg is not None, "a leg ended that did not run"
        return [sig.FreeReservation(leg)]

    def _taken_over(self) -> Effects:
        """The generation side has the KV: the lease is no longer ours."""
        self.state, self._lease = State.GENERATION, None
        return self._stop_renewing()

    def _stop_renewing(self) -> Effects:
        if not self._is_renewing:
            return []
        self._is_renewing = False
        return [sig.StopRenewing()]

    def _end(self, terminal: sig.Finish | sig.Fail) -> Effects:
        """Let go of everything, then answer."""
        effects: Effects = []
        if self._leg is not None:
            effects += [sig.CancelLeg(self._leg), *self._leg_ended()]
        effects += self._stop_renewing()
        if self._lease is not None:
            effects.append(sig.ReleaseLease(self._lease))
            self._lease = None
        self.state = State.DONE
        return [*effects, terminal]

    def check(self) -> None:
        running = {
            State.CONTEXT: Leg.CONTEXT,
            State.HANDOFF: Leg.GENERATION,
            State.GENERATION: Leg.GENERATION,
            State.WHOLE: Leg.WHOLE,
        }
        assert self._leg is running.get(self.state), f"{self.state} with leg {self._leg}"
        has_lease = self._lease is not None
        assert has_lease == (self.state is State.HANDOFF), f"{self.state}: lease {has_lease}"
        assert self._is_renewing == has_lease, f"{self.state}: renewing {self._is_renewing}"


Handler = Callable[[Dispatch, Any], Effects]
_D = Dispatch


def _transitions() -> dict[tuple[State, type], Handler]:
    """The whole table; a pair that is not in it cannot happen."""
    table: dict[tuple[State, type], Handler] = {
        (State.NEW, sig.Started): _D._start,
        (State.CONTEXT, sig.ContextChunk): _D._chunk,
        (State.CONTEXT, sig.ContextFinished): _D._context_finished,
        (State.CONTEXT, sig.ContextFailed): _D._leg_failed,
        (State.HANDOFF, sig.GenerationChunk): _D._first_generation_chunk,
        (State.HANDOFF, sig.GenerationFinished): _D._generation_finished,
        (State.HANDOFF, sig.GenerationFailed): _D._leg_failed,
        (State.GENERATION, sig.GenerationChunk): _D._chunk,
        (State.GENERATION, sig.GenerationFinished): _D._generation_finished,
        (State.GENERATION, sig.GenerationFailed): _D._leg_failed,
        (State.WHOLE, sig.WholeChunk): _D._chunk,
        (State.WHOLE, sig.WholeFinished): _D._whole_finished,
        (State.WHOLE, sig.WholeFailed): _D._leg_failed,
    }
    kind: type
    for kind in (sig.ClientCancelled, sig.DeadlineExpired, sig.Drained, sig.PartnersLost):
        for state in State:
            table[state, kind] = _D._interrupted
        table[State.DONE, kind] = _D._late
    for kind in (sig.ContextChunk, sig.ContextFinished, sig.ContextFailed):
        for state in (State.HANDOFF, State.GENERATION, State.DONE):
            table[state, kind] = _D._late
    for kind in (sig.GenerationChunk, sig.GenerationFinished, sig.GenerationFailed):
        table[State.DONE, kind] = _D._late
    for kind in (sig.WholeChunk, sig.WholeFinished, sig.WholeFailed):
        table[State.DONE, kind] = _D._late
    return table


TABLE = _transitions()
