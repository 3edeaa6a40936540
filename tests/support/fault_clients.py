"""Those who ask a fault world's frontends for answers, and read them.

Each request has a consumer of its own, a task that reads as its gate allows, and
writes what it reads into the history. What a submit must say is worked out here
from what was done to the world, not from the proxy's own flags where that can be.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from executor.engine.scripted_model import scripted_completion
from executor.lane import OWNER_ID
from executor.request import ExecutorRequest
from executor.result import GenerationResult
from protos.errors import (
    BatonError,
    DuplicateRequestError,
    EngineDeadError,
    OverloadedError,
    ServerUnavailableError,
)
from protos.messages import DisaggRequestId, RequestType, SamplingParams
from protos.tokens import pack_token_ids
from tests.support.fault_history import History, Told
from tests.support.fault_world import (
    BRITTLE_ID,
    CONFIG,
    QUEUE_MAX,
    REFUSED_ID,
    SILENCE_S,
    FaultWorld,
    Frontend,
)

TYPES = {
    "plain": RequestType.CONTEXT_AND_GENERATION,
    "context": RequestType.CONTEXT_ONLY,
    "generation": RequestType.GENERATION_ONLY,
}


def completion(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return scripted_completion(pack_token_ids(prompt), 7, num_tokens, CONFIG.scripted)


class Clients:
    def __init__(self, world: FaultWorld) -> None:
        self.world = world
        self.loop = world.loop
        self.history = History(world.loop.time)
        self.results: list[GenerationResult] = []
        self.prompts: dict[DisaggRequestId, tuple[int, ...]] = {}
        self.num_turned_away: Counter[int] = Counter()
        """By lane: registered, but there was no room to send them."""
        self._named: set[str] = set()
        self._gates: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    # --- asking ------------------------------------------------------------------------

    def ask(
        self,
        frontend: Frontend,
        name: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        kind: str = "plain",
        stop: str = "",
        deadline_s: float = 100.0,
        is_lazy: bool = False,
        max_unread: int = 0,
        params: Any = None,
    ) -> Told | None:
        """None where it was refused at once. `params` are what a generation leg takes over."""
        disagg_id = None if params is None else params.disagg_request_id
        if kind == "context":
            disagg_id = DisaggRequestId(1, len(self.prompts) + 1, 0)
            self.prompts[disagg_id] = prompt
        request = ExecutorRequest(
            external_id=name,
            request_type=TYPES[kind],
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=7, stop=(stop,) if stop else ()),
            deadline_s=deadline_s,
            disagg_request_id=disagg_id,
            context_phase_params=params,
            max_unread_tokens=max_unread,
        )
        result = self._submit(frontend, request)
        if result is None:
            return None
        first_index = 0 if params is None else len(params.first_token_ids)
        told = Told(
            lane=frontend.frontend_id,
            name=name,
            kind=kind,
            wanted=completion(prompt, max_tokens)[first_index:],
            first_index=first_index,
            num_prompt=len(prompt),
            stop=stop,
            asked_at_s=self.loop.time(),
            deadline_s=deadline_s,
            is_bad=REFUSED_ID in prompt,
            brittle_id=BRITTLE_ID,
            max_unread=max_unread,
            may_be_cancelled=name in self._named,
        )
        self._follow(told, result, is_lazy=is_lazy)
        return told

    def _submit(self, frontend: Frontend, request: ExecutorRequest) -> GenerationResult | None:
        expected = self._refusals(frontend, request.external_id)
        link, ledger = frontend.link, frontend.proxy._requests.ledger
        num_registered = ledger.counters()["registered"]
        result, error = None, None
        try:
            result = self.loop.do(frontend.proxy.submit, request)
        except BatonError as refusal:
            error = refusal
        kind = None if error is None else type(error)
        assert kind in expected, f"{error!r} came where {expected} should have"
        if kind is EngineDeadError and link.dead.done():
            assert error is link.dead.result(), "not the first cause"
        if error is not None and ledger.counters()["registered"] > num_registered:
            self.num_turned_away[frontend.frontend_id] += 1
        return result

    def _refusals(self, frontend: Frontend, name: str) -> tuple[type[BatonError] | None, ...]:
        """The errors, one of which must come; None stands for being taken."""
        link, lane = frontend.link, frontend.frontend_id
        if link.dead.done() or link.is_suspect:
            return (EngineDeadError,)
        if self.loop.time() - frontend.heard_at_s > SILENCE_S:
            return (ServerUnavailableError,)
        if self.world.is_dead and lane == OWNER_ID:  # not told yet, but there for who looks
            return (EngineDeadError,)
        if frontend.proxy.find(name) is not None:
            return (DuplicateRequestError,)
        unread = () if link.line.has_room() else (ServerUnavailableError,)  # maybe for long
        if frontend.batches:  # what is gathered for a frame may take the room
            return (None, OverloadedError, *unread)
        num_room = 0 if link.line.is_cut else QUEUE_MAX - len(link.line.messages)
        return (None,) if num_room > len(link.requests) else (OverloadedError, *unread)

    def abort_named(self, frontend: Frontend, name: str) -> None:
        """Whoever bears the name when this comes to the worker, on whichever lane."""
        self._named.add(name)
        for told in self.history.told:
            told.may_be_cancelled |= told.name == name and not told.is_over
        self._tasks.append(self.loop.create_task(self._abort_named(frontend, name)))
        self.loop.settle()

    async def _abort_named(self, frontend: Frontend, name: str) -> None:
        with contextlib.suppress(ServerUnavailableError):  # dead, silent, or no room
            await frontend.proxy.abort_named(name)

    # --- reading -----------------------------------------------------------------------

    def _follow(self, told: Told, result: GenerationResult, *, is_lazy: bool) -> None:
        gate = asyncio.Event()
        if not is_lazy:
            gate.set()
        self.history.told.append(told)
        self.results.append(result)
        self._gates.append(gate)
        self._tasks.append(self.loop.create_task(self._consume(told, result, gate)))
        self.loop.settle()

    async def _consume(self, told: Told, result: GenerationResult, gate: asyncio.Event) -> None:
        await gate.wait()
        await self._read(told, result)

    async def _read(self, told: Told, result: GenerationResult) -> None:
        try:
            async for chunk in result:
                told.chunks.append(chunk)
        except BatonError as error:
            self.history.saw_end(told, error)
        else:
            self.history.saw_end(told, None)

    def read_on(self) -> None:
        """The lazy ones too."""
        for gate in self._gates:
            self.loop.do(gate.set)

    def read_again(self) -> None:
        """Invariant 6: an end is what it was, however often it is asked for."""
        for told, result in zip(self.history.told, self.results, strict=True):
            for _ in range(2):
                self.loop.finish(self._read(told, result))

    # --- judging -----------------------------------------------------------------------

    def must_be_over(self, due: Callable[[Told], bool], why: str) -> None:
        """Of those whose consumer reads."""
        for told, gate in zip(self.history.told, self._gates, strict=True):
            if gate.is_set() and due(told):
                assert told.is_over, f"no answer, {why}: {told}"

    def check(self) -> None:
        """What must hold at any time."""
        for frontend in self.world.all():
            if frontend.link.dead.done():
                self.history.deaths.setdefault(frontend.frontend_id, self.loop.time())
                self._check_first_cause(frontend)
        self.history.check()
        for frontend in self.world.all():
            requests = frontend.proxy._requests
            requests.check()
            num_open = sum(
                told.lane == frontend.frontend_id and not told.is_over for told in self.history.told
            )
            assert len(requests) <= num_open, "a live entry that nobody waits for"

    def _check_first_cause(self, frontend: Frontend) -> None:
        cause, lane = frontend.link.dead.result(), frontend.frontend_id
        assert frontend.last_words in cause.message, f"the first cause is hidden: {cause}"
        self.must_be_over(lambda told: told.lane == lane, "its engine is dead")
        for told in self.history.told:
            end = told.ends[0] if told.lane == lane and told.ends else None
            assert not isinstance(end, EngineDeadError) or end is cause, f"another cause: {end}"

    def check_books_at_rest(self) -> None:
        """Counted apart: what was admitted on each lane, and how it ended."""
        for frontend in self.world.all():
            lane, requests = frontend.frontend_id, frontend.proxy._requests
            told = [t for t in self.history.told if t.lane == lane]
            counters = requests.ledger.counters()
            assert len(requests) == 0
            assert counters["registered"] == len(told) + self.num_turned_away[lane]
            ended = sum(counters[how] for how in ("finished", "cancelled", "failed"))
            assert ended == counters["registered"]
            finished = [t for t in told if t.ends[0] is None or BRITTLE_ID in t.wanted]
            assert sum(t.ends[0] is None for t in told) <= counters["finished"] <= len(finished)
