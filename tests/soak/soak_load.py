"""Many clients at once on one executor, each written down in a history that judges them.

A client asks at a moment of its own, reads at a pace of its own, may cancel, may have next to no
time, and may be a context leg followed by its generation leg. What is asked comes from a seed;
how it meets the faults does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from random import Random
from typing import Any

from executor.engine.scripted_model import scripted_completion
from executor.executor import ExecutorRequest, GenerationExecutor, GenerationResult
from protos.errors import BatonError
from protos.messages import DisaggRequestId, SamplingParams
from protos.tokens import pack_token_ids
from tests.soak.soak_forms import ENGINE, LEASE_S
from tests.support.executor_scripted import REFUSE
from tests.support.fault_clients import TYPES
from tests.support.fault_history import History, Told, spell

DEADLINE_S = 20.0
LENGTHS = (1, 2, 5, 20, 100, 400, 1500)


class SoakHistory(History):
    """Also what only real processes bring: lost text workers, and leases that ran out."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.post_hurt_at_s = float("inf")
        self.lease_ends_s: dict[int, float] = {}
        """By the id of a generation leg: the earliest moment at which its lease may be over."""

    def _reasons(self, told: Told) -> dict[str, bool]:
        lease_ends_s = self.lease_ends_s.get(id(told), float("inf"))
        return {
            **super()._reasons(told),
            "PostprocessError": told.ended_at_s >= self.post_hurt_at_s,
            "KvTransferError": told.ended_at_s >= lease_ends_s,
        }

    def ends(self) -> Counter[str]:
        firsts = [told.ends[0] for told in self.told if told.ends]
        return Counter("finished" if end is None else type(end).__name__ for end in firsts)

    def open_ones(self) -> list[Told]:
        return [told for told in self.told if not told.is_over]


class Load:
    def __init__(self, executor: GenerationExecutor, seed: int) -> None:
        self.executor = executor
        self.history = SoakHistory()
        self.refused: Counter[str] = Counter()
        self._seed = seed
        self._num_asked = 0

    async def run(self, num_clients: int, over_s: float) -> None:
        """Returns when all of them have their end."""
        clients = [self._client(over_s) for _ in range(num_clients)]
        await asyncio.gather(*clients)

    async def _client(self, over_s: float) -> None:
        self._num_asked += 1
        number = self._num_asked
        rng = Random(f"{self._seed}/{number}")
        await asyncio.sleep(rng.uniform(0, over_s))
        prompt = tuple(rng.randrange(30_000) for _ in range(rng.choice((1, 3, 20, 60))))
        if rng.random() < 0.2:
            await self._hand_off(rng, number, prompt)
        else:
            await self._plain(rng, number, prompt)

    async def _plain(self, rng: Random, number: int, prompt: tuple[int, ...]) -> None:
        if rng.random() < 0.03:
            prompt = (*prompt, REFUSE)
        max_tokens = rng.choice(LENGTHS)
        stop = ""
        if rng.random() < 0.2 and max_tokens > 2:
            at = rng.randrange(max_tokens - 1)
            stop = spell(completion(prompt, max_tokens)[at : at + rng.choice((1, 2))])
        await self._ask(rng, f"p{number}", prompt, max_tokens, stop=stop)

    async def _hand_off(self, rng: Random, number: int, prompt: tuple[int, ...]) -> None:
        disagg_id = DisaggRequestId(self._seed & 0xFFFF, number, 1)
        asked_s = time.monotonic()
        told = await self._ask(rng, f"c{number}", prompt, 1, kind="context", disagg_id=disagg_id)
        params = None if told is None else told.lease
        if params is None:
            return
        if rng.random() < 0.85:
            await asyncio.sleep(rng.choice((0.0, 0.05)))
            until_s = asked_s + LEASE_S
            more = {"kind": "generation", "params": params, "lease_until_s": until_s}
            await self._ask(rng, f"g{number}", prompt, rng.choice(LENGTHS[1:]), **more)
        if rng.random() < 0.8:
            with contextlib.suppress(BatonError):
                await self.executor.release(params.disagg_request_id, params.pull_token)

    async def _ask(
        self,
        rng: Random,
        name: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        kind: str = "plain",
        stop: str = "",
        disagg_id: DisaggRequestId | None = None,
        params: Any = None,
        lease_until_s: float = 0.0,
    ) -> Told | None:
        """None where it was turned away at once."""
        is_slow, is_hasty = rng.random() < 0.15, rng.random() < 0.1
        first_index = 0 if params is None else len(params.first_token_ids)
        told = Told(
            lane=0,
            name=name,
            kind=kind,
            wanted=completion(prompt, max_tokens)[first_index:],
            first_index=first_index,
            num_prompt=len(prompt),
            stop=stop,
            asked_at_s=time.monotonic(),
            deadline_s=rng.uniform(0.001, 0.3) if is_hasty else DEADLINE_S,
            is_bad=prompt[-1] == REFUSE,
            max_unread=64 if is_slow and rng.random() < 0.3 else 0,
        )
        request = ExecutorRequest(
            external_id=f"{self._seed}-{name}",
            request_type=TYPES[kind],
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=7, stop=(stop,) if stop else ()),
            deadline_s=told.deadline_s,
            disagg_request_id=disagg_id,
            context_phase_params=params,
            max_unread_tokens=told.max_unread,
        )
        try:
            result = self.executor.submit(request)
        except BatonError as error:
            self.refused[type(error).__name__] += 1
            return None
        self.history.told.append(told)
        if params is not None:
            self.history.lease_ends_s[id(told)] = lease_until_s
        cancel_s = rng.uniform(0, 0.8) if rng.random() < 0.15 else None
        await self._follow(told, result, rng.uniform(0, 0.05) if is_slow else 0.0, cancel_s)
        return told

    async def _follow(
        self, told: Told, result: GenerationResult, pace_s: float, cancel_s: float | None
    ) -> None:
        """Twice, for an end is what it was however often it is asked for."""
        if cancel_s is None:
            await self._read(told, result, pace_s)
        else:
            cancel = asyncio.create_task(self._cancel(told, result, cancel_s))
            await self._read(told, result, pace_s)
            cancel.cancel()
            await asyncio.gather(cancel, return_exceptions=True)
        await self._read(told, result, 0.0)

    async def _read(self, told: Told, result: GenerationResult, pace_s: float) -> None:
        try:
            async for chunk in result:
                told.chunks.append(chunk)
                if pace_s:
                    await asyncio.sleep(pace_s)
        except BatonError as error:
            self.history.saw_end(told, error)
        else:
            self.history.saw_end(told, None)

    async def _cancel(self, told: Told, result: GenerationResult, cancel_s: float) -> None:
        await asyncio.sleep(cancel_s)
        told.was_cancelled = True
        result.abort()


def completion(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return scripted_completion(pack_token_ids(prompt), 7, num_tokens, ENGINE.scripted)
