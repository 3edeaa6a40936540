"""The start and death of a world, line by line: which events give which effects, when."""

from __future__ import annotations

import pytest

from executor.world.events import (
    LAUNCHER,
    AckReady,
    Assembled,
    Declare,
    Died,
    Done,
    End,
    GiveUp,
    Gone,
    Heard,
    KillAll,
    Readied,
    Serve,
    StopAsked,
    TellLeave,
    TellStop,
    Tick,
    Welcome,
)
from executor.world.table import SHUT_DOWN
from tests.support.world_table import BOUNDS, Driven

LATER_S = BOUNDS.last_words_s


def test_a_world_of_one_rank_comes_up() -> None:
    world = Driven()
    assert world.hello(0) == [Welcome(0), Assembled()]
    assert world.is_in("loading")
    assert world.give(Readied(0)) == [AckReady(0), Serve()]
    assert world.is_in("serving")


def test_a_members_hello_is_acked_only_once_rank_0_is_known() -> None:
    """Guards: a member that is welcomed without the endpoint of its leader."""
    world = Driven(3)
    assert world.hello(2) == []
    assert world.hello(0) == [Welcome(0), Welcome(2)]
    assert world.hello(1) == [Welcome(1), Assembled()]


def test_what_is_repeated_is_acked_again_and_changes_nothing() -> None:
    """Guards: an ack that was lost with its connection and never comes again."""
    world = Driven(2)
    world.hello(0, 1)
    assert world.hello(0, 1) == [Welcome(0), Welcome(1)]
    assert world.give(Readied(1)) == [AckReady(1)]
    assert world.give(Readied(1)) == [AckReady(1)]
    assert world.give(Readied(0)) == [AckReady(0), Serve()]
    assert world.give(Readied(0)) == [AckReady(0)]


def test_ready_without_hello_and_ranks_that_do_not_exist_are_counted() -> None:
    world = Driven(2)
    assert world.give(Readied(1)) == []
    assert world.give(Heard(7)) == []
    assert world.give(Gone(9, "?")) == []
    assert world.table.num_ignored == 3


def test_a_death_is_declared_after_its_last_words_and_survivors_are_killed_first() -> None:
    world = Driven(2).serving()
    assert world.give(Gone(1, "rank 1 was killed"), at_s=10.0) == []
    assert world.is_in("suspect")
    assert world.table.deadline_s == 10.0 + LATER_S
    assert world.give(Died(1, "MemoryError: no room")) == []
    assert world.give(Gone(0, "rank 0 ended too")) == []
    assert world.give(Tick(), at_s=10.0 + LATER_S) == [
        KillAll(),
        Declare("rank 1: MemoryError: no room; rank 1 was killed; rank 0 ended too"),
    ]
    assert world.give(Gone(LAUNCHER, "late")) == []


def test_more_deaths_do_not_put_the_declaration_off() -> None:
    world = Driven(2).serving()
    world.give(Gone(1, "first"), at_s=10.0)
    world.give(Gone(0, "second"), at_s=10.09)
    assert world.give(Tick(), at_s=10.1) == [KillAll(), Declare("first; second")]


@pytest.mark.parametrize("phase", ["starting", "loading", "serving"])
def test_a_failed_start_is_aborted_before_it_counts_as_dead(phase: str) -> None:
    world = Driven(2)
    if phase != "starting":
        world.hello(0, 1)
    if phase == "serving":
        world.give(Readied(0))
        world.give(Readied(1))
    assert world.is_in(phase)
    world.give(Gone(1, "it is gone"))
    assert world.give(Tick(), at_s=LATER_S) == [KillAll(), Declare("it is gone")]


def test_the_launchers_own_end_is_the_worlds() -> None:
    world = Driven(2, has_launcher=True).serving()
    world.give(Gone(LAUNCHER, "the launcher was killed"))
    assert world.give(Tick(), at_s=1.0) == [KillAll(), Declare("the launcher was killed")]


def test_who_is_late_is_named() -> None:
    world = Driven(3)
    world.hello(0)
    assert world.give(Tick(), at_s=59.9) == []
    assert world.give(Tick(), at_s=60.0) == [
        KillAll(),
        Declare("rank 1, rank 2 did not start within 60 s"),
    ]
    loading = Driven(2)
    loading.hello(0, 1)
    loading.give(Readied(0))
    assert loading.give(Tick(), at_s=100.0) == [
        KillAll(),
        Declare("rank 1 did not load its model within 100 s"),
    ]


def test_giving_up_kills_at_once_and_leads_the_cause() -> None:
    world = Driven().serving()
    assert world.give(GiveUp("it stood still")) == [KillAll()]
    world.give(Gone(0, "SIGKILL"))
    assert world.give(Tick(), at_s=LATER_S) == [KillAll(), Declare("it stood still; SIGKILL")]


def test_a_silent_rank_is_trouble_first_and_dead_later() -> None:
    world = Driven(2).serving()
    for second in range(1, 4):
        world.give(Heard(0), at_s=float(second))
        world.give(Tick())
    assert world.table.trouble(3.0) == ""
    assert world.table.trouble(3.5).startswith("rank 1 has said nothing for 3.5 s")
    for second in range(4, 31):
        world.give(Heard(0), at_s=float(second))
        assert world.give(Tick()) == []
    world.give(Heard(0), at_s=31.0)
    assert world.give(Tick()) == [KillAll()]
    assert "rank 1 said nothing for 30 s" in str(world.give(Tick(), at_s=31.2)[1])


def test_the_leaders_silence_may_be_another_ones_affair() -> None:
    world = Driven(2, watches_leader=False).serving()
    for second in range(1, 40):
        world.give(Heard(1), at_s=float(second))
        assert world.give(Tick()) == []
    assert world.table.trouble(39.0) == ""


def test_an_owner_that_slept_does_not_blame_the_ranks() -> None:
    """Guards: a laptop's lid, or SIGSTOP of the server, that costs it its engine."""
    world = Driven().serving()
    assert world.give(Tick(), at_s=500.0) == []
    assert world.table.trouble(500.0) == ""


def test_short_sleeps_of_the_owner_do_not_add_up_to_a_ranks_silence() -> None:
    """Bug: looks that each came less than a period late were not forgiven; and who asked between
    the owner's long sleep and its next tick was told that a healthy rank is silent."""
    world = Driven(2).serving()
    for at_s in (1.9, 3.8, 5.7):
        assert world.give(Tick(), at_s=at_s) == []
        assert world.table.trouble(at_s) == ""
    world.give(Heard(0))
    world.give(Heard(1))
    assert world.table.trouble(100.0) == ""


def test_a_rank_that_loads_may_be_silent_where_its_end_would_be_seen() -> None:
    seen, unseen = Driven(2), Driven(2)
    seen.hello(0, 1)
    unseen.hello(0, 1, is_seen=False)
    for second in range(1, 32):
        for world in (seen, unseen):
            world.give(Heard(0), at_s=float(second))
            effects = world.give(Tick())
    assert seen.is_in("loading")
    assert unseen.is_in("suspect")
    assert effects == [KillAll()]


def test_a_wanted_end_goes_in_order() -> None:
    world = Driven(2, has_launcher=True).serving()
    assert world.give(StopAsked()) == [TellStop()]
    assert world.table.deadline_s == 180.0
    assert world.give(Done(1)) == []
    assert world.give(Done(0)) == [TellLeave()]
    assert world.give(Gone(0, "")) == []
    assert world.give(Gone(1, "")) == []
    assert world.give(Gone(LAUNCHER, "")) == [End(())]
    assert world.table.cause == SHUT_DOWN
    assert world.give(StopAsked()) == []


def test_whoever_dies_while_stopping_leaves_only_the_short_bound() -> None:
    """Bug: rank 0 alone tells members to stop. Killed in that phase it left rank 1 beating, and
    the shutdown took its whole 180 s."""
    world = Driven(2).serving()
    world.give(StopAsked())
    assert world.give(Gone(0, "killed")) == [KillAll()]
    assert world.is_in("killing")
    assert world.give(Gone(1, "")) == [End(())]

    world = Driven(3, has_launcher=True).serving()
    world.give(StopAsked())
    world.give(Done(1))
    assert world.give(Gone(1, "killed")) == []
    for gone in (Gone(2, "killed"), Gone(LAUNCHER, "killed")):
        world = Driven(3, has_launcher=True).serving()
        world.give(StopAsked())
        assert world.give(gone) == []
        assert world.table.deadline_s == BOUNDS.stop_dead_s_max


def test_a_member_that_missed_its_stop_is_waited_for_a_short_while_after_rank_0() -> None:
    """Bug: rank 0 was done, a member that had not heard of it was waited for as for a long step."""
    world = Driven(2).serving()
    world.give(StopAsked())
    world.give(Done(0), at_s=60.0)
    world.give(Heard(1), at_s=64.0)
    assert world.give(Tick(), at_s=65.0) == [KillAll()]


def test_a_world_in_trouble_gets_the_short_bound() -> None:
    world = Driven().serving()
    assert world.give(StopAsked(is_well=False)) == [TellStop()]
    for second in range(1, 5):
        world.give(Heard(0), at_s=float(second))
        assert world.give(Tick()) == []
    assert world.give(Tick(), at_s=5.0) == [KillAll()]
    assert world.is_in("killing")


def test_a_rank_that_is_stopped_by_a_signal_is_not_waited_for_while_stopping() -> None:
    world = Driven().serving()
    world.give(StopAsked())
    effects = [world.give(Tick(), at_s=float(second)) for second in range(1, 5)]
    assert effects == [[], [], [], [KillAll()]]


def test_a_rank_that_stops_its_work_but_not_in_time_is_killed_then_abandoned() -> None:
    world = Driven(2).serving()
    world.give(StopAsked())
    for second in range(1, 181):
        world.give(Heard(0), at_s=float(second))
        world.give(Heard(1))
        effects = world.give(Tick())
    assert effects == [KillAll()]
    world.give(Gone(1, ""))
    assert world.give(Tick(), at_s=184.9) == []
    assert world.give(Tick(), at_s=185.0) == [End(("rank 0 does not end",))]


def test_a_dead_world_is_waited_for_five_seconds_and_its_launcher_named() -> None:
    world = Driven(1, has_launcher=True).serving()
    world.give(Gone(0, "gone"))
    world.give(Tick(), at_s=1.0)
    assert world.give(StopAsked(), at_s=2.0) == [KillAll()]
    assert world.give(Tick(), at_s=7.0) == [End(("the launcher's process does not end",))]
    assert world.table.cause == "gone"


def test_a_stop_while_a_death_is_read_declares_it_first() -> None:
    """Guards: a shutdown that turns a crash into "it was shut down"."""
    world = Driven().serving()
    world.give(Gone(0, "crashed"))
    assert world.give(StopAsked()) == [KillAll(), Declare("crashed"), KillAll(), End(())]


def test_a_stop_before_anything_is_up_kills() -> None:
    world = Driven(2)
    world.hello(0)
    assert world.give(StopAsked()) == [KillAll()]
    world.give(Gone(0, ""))
    assert world.give(Gone(1, "")) == [End(())]


def test_ranks_that_never_spoke_end_with_the_launcher_that_alone_knows_them() -> None:
    world = Driven(2, has_launcher=True, sees_strangers=False)
    world.give(StopAsked())
    assert world.give(Gone(LAUNCHER, "")) == [End(())]


def test_a_rank_on_another_host_has_ended_with_its_word() -> None:
    world = Driven(2).serving(is_seen=False)
    world.give(StopAsked())
    assert world.give(Done(0)) == []
    assert world.give(Done(1)) == [TellLeave(), End(())]
