"""Bugs planted on purpose: the fault machine must find each within a bounded number of tries.

A machine that finds nothing proves nothing. Each plant below is a mistake that
somebody could make in a few lines; it is patched into the product for one test,
and the machine of test_executor_faults.py is set on it, with fixed seeds. The
number of examples that each took is printed (`pytest -s`) and listed in
docs/faults.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from executor.engine.scripted_pool import ScriptedPool
from executor.engine.seam import EngineOutput
from executor.ledger import Event, Ledger, Outcome, State
from executor.names import Names
from executor.proxy import Proxy
from executor.requests import LiveRequests
from executor.result import GenerationResult, ResultChunk
from executor.worker import Worker
from protos.errors import EngineDeadError, InternalError
from tests.property import test_executor_faults as faults
from tests.support.fault_plays import PLAYS

EXAMPLES_PER_PLAY = (1, 8)
"""First the bare plays, without anything before them; then with random steps before."""
quiet = faults.quiet
Patch = pytest.MonkeyPatch
HandOn = Callable[[EngineOutput], None]
PLANTS: list[Callable[[Patch], None]] = []


def plant(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    PLANTS.append(function)
    return function


class FoundError(Exception):
    """After so many examples."""


def search(num_examples: int, play: str) -> int:
    """How many examples ran without a find. Raises FoundError."""
    num_started = 0

    class Planted(faults.ExecutorMachine):
        def __init__(self) -> None:
            nonlocal num_started
            num_started += 1
            super().__init__()

    Planted.play = play
    wanted = settings(
        max_examples=num_examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(Planted, settings=wanted)
    except (AssertionError, InternalError, KeyError) as error:
        raise FoundError(num_started - 1, play) from error  # the last one was run once more
    return num_started


def find() -> tuple[int, str]:
    """The number of examples until the find, and in which play."""
    num_examples = 0
    for per_play in EXAMPLES_PER_PLAY:
        for play in PLAYS:
            try:
                num_examples += search(per_play, play)
            except FoundError as found:
                return num_examples + found.args[0], play
    raise AssertionError(f"not found in {num_examples} examples")


def patch_outputs(
    patch: Patch, change: Callable[[LiveRequests, EngineOutput, HandOn], None]
) -> None:
    """Every output by itself goes through `change`, which may hand it on."""
    on_outputs = LiveRequests.on_outputs

    def changed(self: LiveRequests, outputs: tuple[EngineOutput, ...]) -> None:
        for output in outputs:
            change(self, output, lambda said: on_outputs(self, (said,)))

    patch.setattr(LiveRequests, "on_outputs", changed)


# --- answers ---------------------------------------------------------------------------


@plant
def a_failed_request_also_finishes(patch: Patch) -> None:
    """A double answer: an error, and later the engine's regular end."""
    failed: dict[int, GenerationResult] = {}
    fail = LiveRequests.fail

    def keep(self: LiveRequests, client_id: int, error: Any) -> None:
        failed[client_id] = self._live[client_id].result
        fail(self, client_id, error)

    def again(self: LiveRequests, output: EngineOutput, hand_on: HandOn) -> None:
        hand_on(output)
        result = failed.get(output.request_id)
        if result is not None and output.finish is not None:
            result._is_ended = False
            result.push(ResultChunk(finish=output.finish))

    patch.setattr(LiveRequests, "fail", keep)
    patch_outputs(patch, again)


@plant
def an_end_that_meets_a_cancel_is_dropped(patch: Patch) -> None:
    """A lost answer: it has finished, but we are waiting for a confirmation."""

    def drop(self: LiveRequests, output: EngineOutput, hand_on: HandOn) -> None:
        is_cancelling = self.ledger.state(output.request_id) is State.CANCELLING
        if not (is_cancelling and output.finish is not None and output.error is None):
            hand_on(output)

    patch_outputs(patch, drop)


@plant
def refusals_leave_only_with_outputs(patch: Patch) -> None:
    """A lost answer: the worker reports nothing where no sequence said anything."""
    report = Worker._report

    def only(self: Worker, outputs: list[EngineOutput]) -> None:
        if outputs or self._accepted:
            report(self, outputs)
        self._refused.clear()

    patch.setattr(Worker, "_report", only)


@plant
def tokens_go_to_a_neighbour(patch: Patch) -> None:
    """An answer to the wrong stream, where both are equally far."""

    def swap(self: LiveRequests, output: EngineOutput, hand_on: HandOn) -> None:
        others = [key for key in self._live if key != output.request_id]
        if output.token_ids and output.finish is None and others:
            text: Any = self._live[others[0]].text
            if text._next_index == output.token_index:
                output = msgspec.structs.replace(output, request_id=others[0])
        hand_on(output)

    patch_outputs(patch, swap)


@plant
def late_tokens_reach_the_reader(patch: Patch) -> None:
    """Tokens after the end, which the proxy had made by itself."""
    failed: dict[int, GenerationResult] = {}
    fail = LiveRequests.fail

    def keep(self: LiveRequests, client_id: int, error: Any) -> None:
        failed[client_id] = self._live[client_id].result
        fail(self, client_id, error)

    def late(self: LiveRequests, output: EngineOutput, hand_on: HandOn) -> None:
        hand_on(output)
        result = failed.get(output.request_id)
        if result is not None and output.token_ids:
            result._is_ended = False
            result.push(ResultChunk(token_index=output.token_index, token_ids=output.token_ids))
            result._is_ended = True

    patch.setattr(LiveRequests, "fail", keep)
    patch_outputs(patch, late)


@plant
def an_end_wakes_nobody(patch: Patch) -> None:
    """A lost answer: it is there, and its reader sleeps."""
    fail = GenerationResult.fail

    def silent(self: GenerationResult, error: Any) -> None:
        reader, self._home_waiter = self._home_waiter, None
        waiters, self._waiters = self._waiters, []
        fail(self, error)
        self._home_waiter, self._waiters = reader, waiters

    patch.setattr(GenerationResult, "fail", silent)


@plant
def an_error_is_told_once(patch: Patch) -> None:
    """Not sticky: the second read of a failed result looks like a normal end."""

    def once(self: GenerationResult, end: Exception) -> Exception:
        error, self._error = self._error, None
        return end if error is None else error

    patch.setattr(GenerationResult, "_ending", once)


@plant
def each_request_gets_a_death_of_its_own(patch: Patch) -> None:
    """The first cause is not the one that everybody reads."""
    on_dead = Proxy.on_dead

    def copied(self: Proxy, error: EngineDeadError) -> None:
        on_dead(self, EngineDeadError(f"the engine died: {error.message}"))

    patch.setattr(Proxy, "on_dead", copied)


@plant
def a_death_forgets_those_that_were_cancelled(patch: Patch) -> None:
    def fail_all(self: LiveRequests, error: Any, *, cancel: bool) -> None:
        for client_id in list(self._live):
            if self.ledger.state(client_id) is not State.CANCELLING:
                self.fail(client_id, error)

    patch.setattr(LiveRequests, "fail_all", fail_all)


# --- cancels ---------------------------------------------------------------------------


@plant
def a_cancel_before_the_acceptance_is_lost(patch: Patch) -> None:
    cancel = LiveRequests.cancel

    def lose(self: LiveRequests, client_id: int) -> None:
        if self.ledger.state(client_id) is State.SENT:
            self.ledger.apply(client_id, Event.CANCEL)
        else:
            cancel(self, client_id)

    patch.setattr(LiveRequests, "cancel", lose)


@plant
def a_cancel_that_overtook_its_request_is_forgotten(patch: Patch) -> None:
    """A forgotten tombstone: the request comes later, and runs."""
    patch.setattr(Ledger, "refuse", lambda self, client_id: None)


@plant
def a_silent_worker_is_not_told_to_stop(patch: Patch) -> None:
    """What we have given up runs on in the engine."""
    fail_all = LiveRequests.fail_all

    def untold(self: LiveRequests, error: Any, *, cancel: bool) -> None:
        fail_all(self, error, cancel=False)

    patch.setattr(LiveRequests, "fail_all", untold)


@plant
def a_closed_lane_leaves_its_requests_running(patch: Patch) -> None:
    def end_lane(self: Worker, frontend_id: int) -> None:
        self._ended_lanes[frontend_id] = None

    patch.setattr(Worker, "_end_lane", end_lane)


@plant
def what_comes_behind_a_closed_lane_is_begun(patch: Patch) -> None:
    """A bug that was ours: a frame read while the lane was being closed."""

    class Forgetful(dict[int, None]):
        def __contains__(self, key: object) -> bool:
            return False

    init = Worker.__init__

    def begun(self: Worker, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self._ended_lanes = Forgetful()

    patch.setattr(Worker, "__init__", begun)


# --- slots and books -------------------------------------------------------------------


@plant
def a_request_leaves_before_it_is_registered(patch: Patch) -> None:
    """Invariant 2: an answer that comes at once finds no slot."""
    add, apply = Ledger._add, Ledger.apply
    unborn: dict[tuple[int, int], str] = {}

    def later(self: Ledger, client_id: int, external_id: str) -> None:
        if external_id:
            unborn[id(self), client_id] = external_id
        else:
            add(self, client_id, external_id)

    def first(self: Ledger, client_id: int, event: Event) -> Outcome:
        external_id = unborn.pop((id(self), client_id), None)
        if external_id is not None:
            add(self, client_id, external_id)
        return apply(self, client_id, event)

    patch.setattr(Ledger, "_add", later)
    patch.setattr(Ledger, "apply", first)


@plant
def nobody_looks_again_after_registering(patch: Patch) -> None:
    """Invariant 2: the queue of a worker that has just died looks merely full."""
    refuse = Proxy._refuse_if_over
    patch.setattr(Proxy, "_refuse_if_over", lambda self, *, looks_now=False: refuse(self))


@plant
def the_dead_are_forgotten_at_once(patch: Patch) -> None:
    """A forgotten tombstone: a second copy of a request is a new request."""
    bury = Ledger._bury

    def forget(self: Ledger, client_id: int, entry: Any) -> None:
        if entry is None:
            bury(self, client_id, entry)

    patch.setattr(Ledger, "_bury", forget)


@plant
def an_expired_request_stays_in_the_books(patch: Patch) -> None:
    """A leak of a live entry: answered, and never taken out."""
    fail = LiveRequests.fail

    def leak(self: LiveRequests, client_id: int, error: Any) -> None:
        if type(error).__name__ == "DeadlineExceededError":
            self._live[client_id].result.fail(error)
        else:
            fail(self, client_id, error)

    patch.setattr(LiveRequests, "fail", leak)


@plant
def a_refused_request_keeps_its_name(patch: Patch) -> None:
    """A leak at the worker: the name is not free for other lanes."""
    give_back, submit = Names.give_back, Worker._submit

    def while_submitting(self: Worker, message: Any) -> None:
        patch.setattr(Names, "give_back", lambda names, client_id: None)
        submit(self, message)
        patch.setattr(Names, "give_back", give_back)

    patch.setattr(Worker, "_submit", while_submitting)


@plant
def leased_blocks_are_counted_for_ever(patch: Patch) -> None:
    """A count that is not taken back."""
    end = ScriptedPool._end

    def uncounted(self: ScriptedPool, disagg_id: Any, counter: str) -> None:
        num_leased = self._num_leased
        end(self, disagg_id, counter)
        self._num_leased = num_leased

    patch.setattr(ScriptedPool, "_end", uncounted)


@plant
def a_lease_is_kept_behind_a_stop_string(patch: Patch) -> None:
    patch.setattr(LiveRequests, "_release", lambda self, lease: None)


@plant
def a_lease_of_a_late_end_is_kept(patch: Patch) -> None:
    patch.setattr(LiveRequests, "_let_go", lambda self, client_id, lease: None)


@plant
def a_lease_is_kept_where_no_text_could_be_made(patch: Patch) -> None:
    """A bug that was ours: the request had failed, and the KV stayed pinned."""
    defect, release = LiveRequests._end_after_defect, LiveRequests._release
    failed: list[bool] = []

    def note(self: LiveRequests, *args: Any, is_end: bool) -> None:
        defect(self, *args, is_end=is_end)
        failed.append(is_end)

    def unless_noted(self: LiveRequests, lease: Any) -> None:
        if not (failed and failed.pop()):
            release(self, lease)

    patch.setattr(LiveRequests, "_end_after_defect", note)
    patch.setattr(LiveRequests, "_release", unless_noted)


@plant
def a_second_copy_of_an_end_takes_the_lease_back(patch: Patch) -> None:
    """A bug that was ours: the reader of the first copy pulls in vain."""
    patch.setattr(Ledger, "end_of", lambda self, client_id: None)


@plant
def a_second_acceptance_kills_the_loop(patch: Patch) -> None:
    """A bug that was ours."""
    apply = Ledger.apply

    def strict(self: Ledger, client_id: int, event: Event) -> Outcome:
        if event is Event.ACCEPT and self.state(client_id) in (State.RUNNING, State.STREAMING):
            raise InternalError("impossible")
        return apply(self, client_id, event)

    patch.setattr(Ledger, "apply", strict)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda function: function.__name__)
def test_the_machine_finds(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    num_examples, play = find()
    print(f"{plant.__name__}: after {num_examples} examples, in {play!r}")


def test_without_a_plant_it_finds_nothing() -> None:
    with pytest.raises(AssertionError, match="not found in"):
        find()
