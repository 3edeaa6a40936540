"""Any history of one request: one answer, nothing held at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import BatonError, ServerUnavailableError
from protos.messages import FinishReason, GenerateChunk
from router import signals as sig
from router.dispatch import Dispatch
from router.signals import Event, Leg
from tests.support.router_events import ID, PARAMS, SIGNED, chunk

MOVES = ("chunk", "empty", "finish", "hand_off", "odd_hand_off", "fail", "gap")
INTERRUPTS: tuple[Event, ...] = (
    sig.ClientCancelled(),
    sig.DeadlineExpired(1.0),
    sig.Drained(),
    sig.PartnersLost("none left"),
)
CHUNKS: dict[Leg, Callable[[GenerateChunk], Event]] = {
    Leg.CONTEXT: sig.ContextChunk,
    Leg.GENERATION: sig.GenerationChunk,
    Leg.WHOLE: sig.WholeChunk,
}
FAILURES: dict[Leg, Callable[[BatonError], Event]] = {
    Leg.CONTEXT: sig.ContextFailed,
    Leg.GENERATION: sig.GenerationFailed,
    Leg.WHOLE: sig.WholeFailed,
}


@dataclass
class World:
    """What the shell and the servers would hold, told by effects alone."""

    running: Leg | None = None
    reserved: list[Leg] = field(default_factory=list)
    leases: int = 0
    renewing: bool = False
    terminals: int = 0
    next_index: int = 0
    has_begun: list[Leg] = field(default_factory=list)

    def apply(self, effects: list[sig.Effect]) -> None:
        has_written = False
        for effect in effects:
            assert self.terminals == 0, f"{effect} after the terminal"
            is_write = isinstance(effect, sig.Emit | sig.Finish | sig.Fail)
            assert is_write or not has_written, f"{effect} after a write"
            has_written = has_written or is_write
            self._apply(effect)

    def _apply(self, effect: sig.Effect) -> None:
        match effect:
            case sig.CallContext():
                self._call(Leg.CONTEXT)
            case sig.CallGeneration():
                self._call(Leg.GENERATION)
            case sig.CallWhole():
                self._call(Leg.WHOLE)
            case sig.CancelLeg(leg):
                assert self.running is leg
                self.running = None
            case sig.FreeReservation(leg):
                self.reserved.remove(leg)
            case sig.Finish() | sig.Fail():
                self.terminals += 1
            case sig.Emit(one):
                assert one.token_index == self.next_index - len(one.token_ids)
                assert one.context_phase_params is None
            case _:
                self._apply_to_lease(effect)

    def _apply_to_lease(self, effect: sig.Effect) -> None:
        if isinstance(effect, sig.ReleaseLease):
            self.leases -= 1
            return
        is_start = isinstance(effect, sig.StartRenewing)
        assert self.renewing != is_start, "renewed twice, or stopped without a start"
        self.renewing = is_start

    def _call(self, leg: Leg) -> None:
        assert self.running is None, "two legs at once"
        self.running = leg
        self.reserved.append(leg)
        self.has_begun.append(leg)


def leg_event(world: World, leg: Leg, move: str) -> Event:
    """What the running leg's server does next."""
    index = world.next_index
    if move in ("hand_off", "odd_hand_off") and leg is Leg.CONTEXT:
        reason = FinishReason.CONTEXT if move == "hand_off" else FinishReason.STOP
        last = chunk(index, reason, context_phase_params=SIGNED)
        world.leases += 1
        world.running = None
        world.next_index += 1
        return sig.ContextFinished(last, PARAMS)
    if move == "fail":
        world.running = None
        return FAILURES[leg](ServerUnavailableError("gone"))
    if move == "empty":
        return CHUNKS[leg](GenerateChunk(external_id="x"))
    if leg is Leg.GENERATION:
        world.leases = 0  # its first token, right or wrong, proves the pull
    if move == "gap":
        return CHUNKS[leg](chunk(index + 1))
    world.next_index += 1
    if move != "finish":
        return CHUNKS[leg](chunk(index))
    world.running = None
    last = chunk(index, FinishReason.LENGTH)
    if leg is Leg.CONTEXT:
        return sig.ContextFinished(last, None)
    return sig.GenerationFinished(last) if leg is Leg.GENERATION else sig.WholeFinished(last)


def late_event(leg: Leg) -> Event:
    return FAILURES[leg](ServerUnavailableError("late"))


@settings(max_examples=300, deadline=None)
@given(
    st.booleans(),
    st.lists(st.sampled_from((*MOVES, "interrupt", "late")), max_size=8),
    st.sampled_from(INTERRUPTS),
)
def test_one_answer_and_nothing_left(whole: bool, moves: list[str], interrupt: Event) -> None:
    """Guards invariants 1, 5 and 8 for the router: whatever the order of events, exactly one
    terminal leaves, reservations and leases are back at zero, and nothing renews."""
    machine = Dispatch("r", disagg_request_id=None if whole else ID, seed=5)
    world = World()
    world.apply(machine.handle(sig.Started()))
    for move in moves:
        machine.check()
        ended = [leg for leg in world.has_begun if leg is not world.running]
        if move == "interrupt":
            world.apply(machine.handle(interrupt))
            world.running = None if machine.is_done else world.running
        elif move == "late" and ended:
            assert machine.handle(late_event(ended[0])) == []
        elif move != "late" and world.running is not None:
            world.apply(machine.handle(leg_event(world, world.running, move)))
    if not machine.is_done:
        world.apply(machine.handle(interrupt))
    machine.check()
    assert world.terminals == 1
    assert (world.reserved, world.leases, world.renewing) == ([], 0, False)
