"""What may happen to a fault world, step by step, and set plays that lead into its rare corners.

A machine puts the world into a random state by single steps. A play then arranges,
on top of that state, what random steps seldom arrange: cancels at each station of a
request's way, copies of every message, a lane that closes or a worker that stands
still or dies with work in every state. Each step checks what must hold after it.
"""

from __future__ import annotations

from collections.abc import Callable

from executor.engine.seam import EngineOutput
from executor.messages import Cancel, Outputs, Submit
from tests.support.fault_clients import Clients, completion
from tests.support.fault_history import Told, spell
from tests.support.fault_world import (
    GRACE_S,
    HEARTBEAT_S,
    LAST_WORDS_S,
    LEASE_S,
    REFUSED_ID,
    SILENCE_S,
    FaultWorld,
    Frontend,
)

LONG = 30
ROUNDS_TO_REST = 600
TAKEN, WORKED, ANSWERED = 1, 2, 3
"""Stations of a message's way to the worker and back."""
WAYS = range(ANSWERED + 1)


class Plays:
    def __init__(self, world: FaultWorld, clients: Clients) -> None:
        self.world, self.clients = world, clients
        self.loop, self.history = world.loop, clients.history

    # --- steps ---------------------------------------------------------------------------

    def go(self, frontend: Frontend, way: int) -> None:
        """The first `way` stations of the way to the worker and back."""
        if way >= TAKEN:
            self.world.take(frontend, 4)
        if way >= WORKED:
            self.world.round()
        if way >= ANSWERED:
            self.world.deliver(frontend)

    def come_to_the_worker(self) -> None:
        """All there and back. Invariant 8: the round after a cancel ends its request; and the
        worker knows what its open lanes know, and no more."""
        self.world.drain_to_worker()
        self.world.round()
        for frontend in self.world.all():
            self.world.deliver(frontend)
        if self.world.is_dead:
            return
        self.clients.must_be_over(lambda told: told.was_cancelled, "a round after its cancel")
        self._both_sides_agree()

    def _both_sides_agree(self) -> None:
        """But for what was decided just now, of which the loop hears in its next round: a lane
        was closed, or no text could be made of an answer."""
        worker = self.world.worker
        going = {message.client_id for message in self.world.waiting_cancels()}
        open_lanes = {f.frontend_id for f in self.world.all() if f.is_open}
        known = [
            client_id
            for lane in open_lanes
            for client_id in self.world.frontends[lane].proxy._requests.ledger.live()
        ]
        live = [
            client_id
            for client_id in worker._ledger.live()
            if client_id >> 48 in open_lanes | set(worker._ended_lanes)
        ]
        assert set(live) - going == set(known) - going, "the sides disagree"

    def cancel(self, told: Told, *, overtakes: bool = False, way: int = 0) -> None:
        told.was_cancelled = True
        index = next(i for i, other in enumerate(self.history.told) if other is told)
        self.loop.do(self.clients.results[index].abort)
        frontend = self.world.frontends[told.lane]
        if overtakes:
            self.world.hurry_cancels(frontend)
        self.go(frontend, way)

    def wait(self, duration_s: float, *, is_heard: bool) -> None:
        """Time passes; the heart is heard in it, or the worker is stopped."""
        heard_at_s = {f.frontend_id: f.heard_at_s for f in self.world.all()}
        self.world.pass_time(duration_s, is_heard=is_heard)
        now_s = self.loop.time()
        for frontend in self.world.all():
            self._after_silence(frontend, heard_at_s[frontend.frontend_id], now_s)
        late_s = GRACE_S + 2 * HEARTBEAT_S
        self.clients.must_be_over(
            lambda told: told.asked_at_s + told.deadline_s + late_s <= now_s, "overdue"
        )

    def _after_silence(self, frontend: Frontend, heard_at_s: float, now_s: float) -> None:
        if frontend.link.line.is_cut:  # told as unread, whatever is heard
            self.history.silences.append((frontend.frontend_id, heard_at_s, now_s))
        if frontend.heard_at_s > heard_at_s or now_s - heard_at_s <= SILENCE_S:
            return
        lane = frontend.frontend_id
        self.history.silences.append((lane, heard_at_s + SILENCE_S, now_s))
        if now_s - heard_at_s > SILENCE_S + 2 * HEARTBEAT_S:
            self.clients.must_be_over(lambda told: told.lane == lane, "long after a silence")

    def copy_answer(self, frontend: Frontend) -> None:
        """The next message to the proxy comes twice."""
        if frontend.to_proxy and isinstance(frontend.to_proxy[0], Outputs):
            frontend.to_proxy.insert(1, frontend.to_proxy[0])
            self.world.deliver(frontend, 2)

    def copy_message(self, frontend: Frontend, num_rounds: int) -> None:
        """The next message to the worker comes twice, the second time some rounds later."""
        line = frontend.link.line.messages
        if line and isinstance(line[0], Submit | Cancel):
            line.insert(1, line[0])
            self.world.take(frontend, 1)
            for _ in range(num_rounds):
                self.world.round()
            self.world.take(frontend, 1)

    def stray_answer(self, frontend: Frontend, number: int) -> None:
        """What the worker never said, of a request that ended or never was."""
        client_id = (frontend.frontend_id << 48) + number
        if frontend.proxy._requests.ledger.state(client_id) in (None, "tombstone"):
            stray = EngineOutput(request_id=client_id, token_ids=(1,))
            self.world.tell(frontend, [Outputs((client_id,), (stray,))])

    def close_lane(self, frontend: Frontend, *, asks: bool, way: int) -> None:
        """The frontend does not know yet: it may ask once more."""
        self.world.close_lane(frontend.frontend_id)
        if asks:
            self.clients.ask(frontend, "late", (1,), LONG)
            self.loop.do(frontend.link.requests.flush)
        self.go(frontend, way)

    # --- plays ---------------------------------------------------------------------------

    def cancels(self) -> None:
        """At each station; and one that overtakes its request on the way."""
        for frontend in self.world.all():
            for way in WAYS:
                for overtakes in (False, True):
                    told = self.clients.ask(frontend, f"c{way}{overtakes}", (way, 2), LONG)
                    self.go(frontend, way)
                    if told is not None:
                        self.cancel(told, overtakes=overtakes, way=TAKEN)
                    self.come_to_the_worker()

    def ends_that_meet_cancels(self) -> None:
        """The last step is done when the cancel leaves, or is done before the cancel comes."""
        for frontend in self.world.all():
            for way in WAYS:
                self.come_to_the_worker()
                told = self.clients.ask(frontend, "e", (way, 3), 1)
                self.go(frontend, min(way, WORKED))
                if told is not None:
                    self.cancel(told, way=way)
                self.come_to_the_worker()

    def silence(self) -> None:
        """The worker is stopped with work in every state, and goes on."""
        self._work_everywhere("s")
        self.wait(SILENCE_S + 3 * HEARTBEAT_S, is_heard=False)
        self._ask_everywhere("t")
        self.come_to_the_worker()
        self._ask_everywhere("u")

    def expiry(self) -> None:
        """The engine is too late for short deadlines: the proxy ends them, and then it speaks."""
        self._work_everywhere("p", deadline_s=1.0)
        for frontend in self.world.all():
            self.world.take(frontend, 4)
        self.world.round()
        self.wait(1.0 + GRACE_S + 3 * HEARTBEAT_S, is_heard=True)
        for frontend in self.world.all():
            self.world.deliver(frontend)

    def closing(self) -> None:
        self._work_everywhere("l")
        for number, frontend in enumerate(self.world.all()[1:]):
            if frontend.is_open:
                self.close_lane(frontend, asks=number % 2 == 0, way=number % 2)
        self.come_to_the_worker()
        self.world.attach()
        self._work_everywhere("k")

    def copies(self) -> None:
        """Of a context phase that ends, of a request that runs, and of their answers."""
        self.come_to_the_worker()
        for number, frontend in enumerate(self.world.all()):
            self.clients.ask(frontend, f"f{number}", (4,) * 5, 1, kind="context")
            self.copy_message(frontend, number)
            self.clients.ask(frontend, f"d{number}", (4, 4), 3)
            self.copy_message(frontend, number)
            for _ in WAYS:
                self.world.round()
                self.copy_answer(frontend)
            self.come_to_the_worker()
        held = self._holders()
        for told in self.history.told:
            if told.lease is not None and told.ended_at_s == self.loop.time():
                assert f"lease:{told.lease.disagg_request_id}" in held, f"taken back: {told}"

    def leases(self) -> None:
        """Context phases whose KV nobody will fetch: given up by us before their end came, or
        ended by a stop string, by a cancel at each station, by a text that cannot be made."""
        self.let_all_end()
        for frontend in self.world.all():
            self.clients.ask(frontend, "q", (6, 6), 1, kind="context")
            self.go(frontend, WORKED)
        self.wait(SILENCE_S + 2 * HEARTBEAT_S, is_heard=False)
        self.come_to_the_worker()
        for frontend in self.world.all():
            for way in WAYS:
                prompt = (6, 6, 6, 6, way)
                stop = spell(completion(prompt, 1))
                self.clients.ask(frontend, f"n{way}", prompt, 1, kind="context", stop=stop)
                told = self.clients.ask(frontend, f"o{way}", prompt, 1, kind="context")
                self.go(frontend, way)
                if told is not None:
                    self.cancel(told, way=WORKED)
            self.clients.ask(frontend, "v", (3,) * 5, 1, kind="context")
            self.come_to_the_worker()

    def refusals(self) -> None:
        """Where nobody else says anything; and the name is then free for others."""
        self.let_all_end()
        for frontend in self.world.all():
            self.clients.ask(frontend, "r", (1, REFUSED_ID), 3)
            self.come_to_the_worker()
            self.clients.must_be_over(lambda told: told.is_bad, "though it was refused")

    def death(self, breaks_in: str) -> None:
        """With work in every state; more is asked before, between and after."""
        self._work_everywhere("x")
        for number, told in enumerate(t for t in self.history.told if not t.is_over):
            if number % 2:
                self.cancel(told)
        if breaks_in:
            self.world.engine.breaks_in = breaks_in
            self.world.drain_to_worker()
            self.world.round()
        self.world.kill()
        self._ask_everywhere("y")
        self.world.notice()
        self._ask_everywhere("z")
        for frontend in self.world.all():  # the last words are read before a death is handled
            self.world.deliver(frontend)
        self.world.pass_time(2 * LAST_WORDS_S, is_heard=False)
        assert all(frontend.link.dead.done() for frontend in self.world.all())
        self._ask_everywhere("w")

    def _ask_everywhere(self, name: str) -> None:
        for frontend in self.world.all():
            self.clients.ask(frontend, f"{name}{frontend.frontend_id}", (5, 5), LONG)

    def _work_everywhere(self, name: str, deadline_s: float = 100.0) -> None:
        """On each lane one request at each station, the last one first."""
        for frontend in self.world.all():
            for way in reversed(WAYS):
                prompt = (frontend.frontend_id, way)
                full_name = f"{name}{frontend.frontend_id}{way}"
                self.clients.ask(frontend, full_name, prompt, LONG, deadline_s=deadline_s)
                self.go(frontend, way)

    # --- rest ----------------------------------------------------------------------------

    def let_all_end(self) -> None:
        """Where nothing moves, a context phase may wait for the end of a lease."""
        for _ in range(ROUNDS_TO_REST):
            self.come_to_the_worker()
            if not any(len(frontend.proxy._requests) for frontend in self.world.all()):
                break
            if not self.world.engine.has_work():
                self.wait(LEASE_S, is_heard=True)
        self.come_to_the_worker()  # what the ends themselves had to say

    def come_to_rest(self) -> None:
        """Liveness: without further faults everything ends, and nothing is left."""
        if not self.world.is_dead:
            self.let_all_end()
        self.clients.read_on()
        self.clients.check()
        self.clients.must_be_over(lambda _: True, "at rest")
        self.clients.read_again()
        self.clients.check()
        self.clients.check_books_at_rest()
        if not self.world.is_dead:
            self._check_worker_at_rest()

    def _check_worker_at_rest(self) -> None:
        worker, engine = self.world.worker, self.world.engine
        worker._ledger.check()
        assert len(worker._ledger) == len(worker._names) == 0
        assert engine.audit().counters["submitted"] <= len(self.history.told), "executed twice"
        leases = [told.lease for told in self.history.told if told.lease is not None]
        known = {f"lease:{lease.disagg_request_id}" for lease in leases}
        if all(frontend.is_open for frontend in self.world.all()):
            held = self._holders()
            assert held <= known, f"leased to nobody: {held - known}"
        self.world.pass_time(LEASE_S + 1, is_heard=True)
        self.world.round()
        assert self._holders() == set()
        load = engine.load()
        assert (load.num_queued, load.num_running) == (0, 0)

    def _holders(self) -> set[str]:
        holders = self.world.engine.audit().holders
        return {name for names in holders.values() for name in names}


PLAYS: dict[str, Callable[[Plays], None]] = {
    "rest": lambda plays: None,
    "cancels": Plays.cancels,
    "ends that meet cancels": Plays.ends_that_meet_cancels,
    "silence": Plays.silence,
    "expiry": Plays.expiry,
    "closing": Plays.closing,
    "copies": Plays.copies,
    "leases": Plays.leases,
    "refusals": Plays.refusals,
    "kill": lambda plays: plays.death(""),
    "broken step": lambda plays: plays.death("step"),
    "broken submit": lambda plays: plays.death("submit"),
}
