"""The machine of one request, entry by entry."""

from __future__ import annotations

import pytest

from protos.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    ServerUnavailableError,
)
from protos.messages import (
    DisaggRequestId,
    FinishReason,
    GenerateChunk,
    KvStats,
    StageTimes,
    Usage,
)
from router import signals as sig
from router.dispatch import TABLE, Dispatch, State
from router.signals import Event, Leg
from tests.support.router_events import ID, PARAMS, SIGNED, chunk

LEASE = sig.Lease(ID, b"pull", 9000)
DEAD = ServerUnavailableError("gone")


def handed_off() -> sig.ContextFinished:
    last = chunk(0, FinishReason.CONTEXT, context_phase_params=SIGNED)
    return sig.ContextFinished(last, PARAMS)


def machine(*events: Event, whole: bool = False) -> Dispatch:
    made = Dispatch("r", disagg_request_id=None if whole else ID, seed=5)
    for event in (sig.Started(), *events):
        made.handle(event)
        made.check()
    return made


def names(effects: list[sig.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_a_hand_off_calls_generation_before_it_writes() -> None:
    """Guards the shell's rule: what only starts something comes before the writes."""
    effects = machine().handle(handed_off())
    assert effects[:3] == [
        sig.FreeReservation(Leg.CONTEXT),
        sig.CallGeneration(SIGNED),
        sig.StartRenewing(LEASE),
    ]
    [emitted] = effects[3:]
    assert isinstance(emitted, sig.Emit)
    assert emitted.chunk == GenerateChunk(
        external_id="r", token_index=0, token_ids=(10,), text="ab", text_offset=0, seed=5
    )


def test_generation_takes_the_lease_over_with_its_first_token() -> None:
    """Guards renewals that would go on for ever, and a release of KV that is being read."""
    made = machine(handed_off())
    assert names(made.handle(sig.GenerationChunk(chunk(1)))) == ["StopRenewing", "Emit"]
    assert names(made.handle(sig.GenerationChunk(chunk(2)))) == ["Emit"]
    effects = made.handle(sig.GenerationFailed(DEAD))
    assert effects == [sig.FreeReservation(Leg.GENERATION), sig.Fail(DEAD)]


def test_finish_sums_usage_and_keeps_both_timings() -> None:
    """Guards the one bookkeeper: prompt and cached from the context leg, completion from both."""
    made = machine(handed_off(), sig.GenerationChunk(chunk(1)))
    effects = made.handle(sig.GenerationFinished(chunk(2, FinishReason.STOP)))
    finish = effects[-1]
    assert isinstance(finish, sig.Finish)
    assert finish.chunk.finish is not None
    assert finish.chunk.finish.usage == Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2)
    assert finish.chunk.finish.kv == KvStats(transferred_blocks=2)
    assert finish.chunk.finish.context_timing == StageTimes(first_token_ms=4.0)
    assert names(effects) == ["FreeReservation", "Finish"]


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (sig.ClientCancelled(), RequestCancelledError),
        (sig.PartnersLost("none left"), ServerUnavailableError),
        (sig.DeadlineExpired(2.0), DeadlineExceededError),
        (sig.Drained(), ServerUnavailableError),
    ],
)
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), ["CancelLeg", "FreeReservation", "Fail"]),
        (
            (handed_off(),),
            ["CancelLeg", "FreeReservation", "StopRenewing", "ReleaseLease", "Fail"],
        ),
        ((handed_off(), sig.GenerationChunk(chunk(1))), ["CancelLeg", "FreeReservation", "Fail"]),
    ],
)
def test_an_interrupt_lets_go_of_everything(
    events: tuple[Event, ...], expected: list[str], event: Event, kind: type[Exception]
) -> None:
    """Guards cancel, deadline and drain in each state: leg, reservation, lease, answer."""
    made = machine(*events)
    effects = made.handle(event)
    assert names(effects) == expected
    assert isinstance(effects[-1], sig.Fail)
    assert isinstance(effects[-1].error, kind)
    made.check()
    assert made.handle(event) == [], "a second interrupt is late"
    assert made.num_late == 1


def test_a_failed_generation_leg_releases_a_lease_it_did_not_take() -> None:
    """Guards pinned blocks on the context server after a failed pull."""
    effects = machine(handed_off()).handle(sig.GenerationFailed(DEAD))
    assert effects == [
        sig.FreeReservation(Leg.GENERATION),
        sig.StopRenewing(),
        sig.ReleaseLease(LEASE),
        sig.Fail(DEAD),
    ]


def test_an_empty_generation_chunk_is_no_proof_of_the_pull() -> None:
    """Guards the lease: a server may speak before the KV has arrived."""
    made = machine(handed_off())
    assert made.handle(sig.GenerationChunk(GenerateChunk(external_id="x"))) == []
    assert made.state is State.HANDOFF


def test_a_first_token_that_ends_the_request_finishes_it() -> None:
    """Guards an immediate stop; a lease that came along all the same is released."""
    last = chunk(0, FinishReason.STOP)
    assert names(machine().handle(sig.ContextFinished(last, None))) == ["FreeReservation", "Finish"]
    effects = machine().handle(sig.ContextFinished(last, PARAMS))
    assert names(effects) == ["FreeReservation", "ReleaseLease", "Finish"]


def test_a_wrong_hand_off_fails_and_is_released() -> None:
    """Guards against another request's KV, and against a hand-off without parameters."""
    last = chunk(0, FinishReason.CONTEXT, context_phase_params=SIGNED)
    effects = machine().handle(sig.ContextFinished(last, None))
    assert isinstance(effects[-1], sig.Fail)
    assert isinstance(effects[-1].error, InternalError)
    made = Dispatch("r", disagg_request_id=DisaggRequestId(7, 2, 0), seed=5)
    made.handle(sig.Started())
    assert names(made.handle(sig.ContextFinished(last, PARAMS))) == [
        "FreeReservation",
        "ReleaseLease",
        "Fail",
    ]


@pytest.mark.parametrize(
    "bad",
    [
        chunk(2),
        chunk(0),
        GenerateChunk(external_id="x", token_index=1, token_ids=(1,), text="z", text_offset=3),
    ],
    ids=["gap", "repeat", "text gap"],
)
def test_a_gap_or_repeat_ends_the_request(bad: GenerateChunk) -> None:
    """Guards exactly-once for tokens and for text."""
    effects = machine(handed_off()).handle(sig.GenerationChunk(bad))
    assert isinstance(effects[-1], sig.Fail)
    assert isinstance(effects[-1].error, InternalError)
    assert not any(isinstance(effect, sig.Emit) for effect in effects)


def test_a_whole_leg_is_forwarded_and_its_seed_told_once() -> None:
    """Guards the one-leg path."""
    made = machine(whole=True)
    first = made.handle(sig.WholeChunk(chunk(0)))
    assert isinstance(first[0], sig.Emit)
    assert first[0].chunk.seed == 5
    effects = made.handle(sig.WholeFinished(chunk(1, FinishReason.LENGTH)))
    assert isinstance(effects[-1], sig.Finish)
    assert effects[-1].chunk.seed == 0
    hand_off = machine(whole=True).handle(sig.WholeFinished(chunk(0, FinishReason.CONTEXT)))
    assert isinstance(hand_off[-1], sig.Fail)


def test_what_cannot_be_raises_with_the_story() -> None:
    """Guards against a shell that mixes up its legs."""
    made = machine(handed_off())
    with pytest.raises(InternalError, match="context-ContextFinished->handoff"):
        made.handle(sig.WholeChunk(chunk(1)))


def test_every_state_has_its_entries() -> None:
    """Guards the table itself: interrupts everywhere, and the end takes everything as late."""
    for state in State:
        for kind in (sig.ClientCancelled, sig.DeadlineExpired, sig.Drained, sig.PartnersLost):
            assert (state, kind) in TABLE
    late = [handler for (state, _), handler in TABLE.items() if state is State.DONE]
    assert len(late) == 13
    assert all(handler is Dispatch._late for handler in late)
