"""One round: a form is opened, loaded and hurt; then everything about it is judged.

Judged are: one answer each, of the right tokens, for a reason (tests/support/fault_history.py);
the time from a death to the last answer; a world that lives serves on and is at its baseline; a
dead one refuses with its cause; and nothing is left once it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from executor.executor import GenerationExecutor
from protos.errors import EngineDeadError, PostprocessError, ServerUnavailableError
from tests.soak.soak_forms import (
    ENGINE,
    HEALTH,
    LEASE_S,
    SHARED,
    TIMES_ALLOWED,
    Stage,
    attached_stage,
    staged,
)
from tests.soak.soak_front import front_process
from tests.soak.soak_load import Load, completion
from tests.soak.soak_nemesis import Deed, Nemesis, bound_s, death_bound_s, draw
from tests.soak.soak_owner import owner_process, play_owner, point_of
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import EMPTY_STATES, collect, request, tokens

OVER_S = 1.6
ROUND_S_MAX = 90.0
SETTLE_S_MAX = LEASE_S + 10.0
NUM_AFTER = 20
TAIL = 12


@dataclass
class Round:
    form: str
    seed: int
    num_clients: int
    deeds: list[Deed] = field(default_factory=list)
    num_requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    worst_s: float = 0.0
    """From a death to the last answer."""
    violation: str = ""


def play(form: str, seed: int, num_clients: int, cluster: Callable[[], str]) -> Round:
    told = Round(form, seed, num_clients)
    cluster()
    loads: list[Load] = []
    try:
        with nothing_left():
            asyncio.run(_bounded(told, cluster, loads))
    except (Exception, ExceptionGroup) as error:
        told.violation = f"{type(error).__name__}: {error}\n{_tail(told, loads)}"
    for load in loads:
        told.num_requests += len(load.history.told)
        told.refused += load.refused
        told.ends += load.history.ends()
    return told


async def _bounded(told: Round, cluster: Callable[[], str], loads: list[Load]) -> None:
    deeds = draw(told.form, Random(f"{told.form}/{told.seed}"))
    async with asyncio.timeout(ROUND_S_MAX):
        if told.form in SHARED:
            await _play_shared(told, deeds, loads)
        elif deeds and deeds[0].role == "owner":
            await play_owner(told.form, told.seed, deeds[0], cluster())
            told.deeds = deeds
        else:
            async with staged(told.form, cluster) as stage:
                await _play(told, deeds, stage, loads)


async def _play_shared(told: Round, deeds: list[Deed], loads: list[Load]) -> None:
    """The world's owner ends last."""
    owner = owner_process(told.form, told.seed, "")
    try:
        await owner.spawn()
        point = point_of(json.loads(await owner.first_word()))
        async with attached_stage(told.form, point, lambda: owner.pid) as stage:
            await _play(told, deeds, stage, loads)
    finally:
        await owner.end(was_hurt=_was_hurt(told, "owner"))


def _was_hurt(told: Round, role: str) -> bool:
    return any(deed.role == role for deed in told.deeds)


async def _play(told: Round, deeds: list[Deed], stage: Stage, loads: list[Load]) -> None:
    load = Load(stage.executor, told.seed)
    loads.append(load)
    front = None
    if stage.point is not None:
        front = front_process(stage.point, told.seed + 1)
        await front.spawn()
        assert await front.first_word() == "serving"
    try:
        nemesis = Nemesis(stage, load, lambda: front.pid if front else 0, told.seed)
        told.deeds = nemesis.done
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(told.num_clients, OVER_S))
            group.create_task(nemesis.act(deeds))
    finally:
        if front is not None:
            await front.end(was_hurt=_was_hurt(told, "front"))
    assert not load.history.open_ones(), "no answer"
    load.history.check()
    _judge_refusals(load)
    _judge_post_deaths(told, load)
    deadly = next((deed for deed in told.deeds if deed.may_end_the_world), None)
    if deadly is not None and await _is_dead(stage, deadly):
        _judge_death(told, load, deadly)
    else:
        await _serves_on(stage, told.seed)


async def _is_dead(stage: Stage, deadly: Deed) -> bool:
    """All of its frontends, in time, with their cause; or none where it need not die."""
    limit_s = TIMES_ALLOWED * death_bound_s(deadly)
    waits = [asyncio.ensure_future(front.wait_dead()) for front in stage.fronts]
    left_s = deadly.done_at_s + limit_s - time.monotonic()
    done, pending = await asyncio.wait(waits, timeout=max(left_s, 0.1))
    for wait in pending:
        wait.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if not done and not deadly.must_end_the_world:
        return False
    assert not pending, f"not dead {limit_s:.1f} s after {deadly}"
    for front in stage.fronts:
        cause = (await front.wait_dead()).message
        assert cause, "a death without a cause"
        with contextlib.suppress(EngineDeadError):
            front.submit(request("late"))
            raise AssertionError("a dead engine takes requests")
    return True


def _judge_death(told: Round, load: Load, deadly: Deed) -> None:
    lasts = [each.ended_at_s - deadly.done_at_s for each in load.history.told]
    told.worst_s = max(lasts, default=0.0)
    limit_s = TIMES_ALLOWED * bound_s(deadly)
    if deadly.must_end_the_world:
        assert told.worst_s <= limit_s, f"an answer came {told.worst_s:.2f} s after {deadly}"


def _judge_refusals(load: Load) -> None:
    """Who was turned away at once, was for a reason."""
    reasons = {
        "OverloadedError": True,
        "EngineDeadError": 0 in load.history.deaths,
        "ServerUnavailableError": bool(load.history.silences),
    }
    odd = [name for name in load.refused if not reasons.get(name, False)]
    assert not odd, f"turned away for no reason: {odd}"


def _judge_post_deaths(told: Round, load: Load) -> None:
    """Who lost its text was told soon after some text worker was hurt."""
    deeds = [deed for deed in told.deeds if deed.role == "post"]
    for each in load.history.told:
        if isinstance(each.ends[0], PostprocessError):
            late_s = min(
                each.ended_at_s - deed.done_at_s - TIMES_ALLOWED * bound_s(deed)
                for deed in deeds
                if deed.done_at_s <= each.ended_at_s
            )
            assert late_s <= 0, f"told {late_s:.2f} s too late that its text worker died: {each}"


async def _serves_on(stage: Stage, seed: int) -> None:
    for front in stage.fronts:
        await _until_well(front)
    executor = stage.executor
    prompts = {f"{seed}-after{i}": (i, seed & 0xFF) for i in range(NUM_AFTER)}
    asked = {
        name: executor.submit(request(name, prompt, max_tokens=9))
        for name, prompt in prompts.items()
    }
    async with asyncio.timeout(SETTLE_S_MAX):
        for name, result in asked.items():
            said = tokens(await collect(result))
            assert said == completion(prompts[name], 9), f"afterwards, wrong tokens: {name}"
    ends_at_s = time.monotonic() + SETTLE_S_MAX
    while excess := await _excess(executor):
        assert time.monotonic() < ends_at_s, f"not at the baseline: {excess}"
        await asyncio.sleep(0.1)


async def _until_well(front: GenerationExecutor) -> None:
    async with asyncio.timeout(TIMES_ALLOWED * HEALTH.silence_s):
        while True:
            try:
                return front.check_health()
            except EngineDeadError as error:
                raise AssertionError(f"a death for no reason: {error}") from error
            except ServerUnavailableError:
                await asyncio.sleep(0.05)


async def _excess(executor: GenerationExecutor) -> str:
    """What is still held."""
    audit = await executor.audit()
    live = {k: v for k, v in audit.entries_by_state.items() if v}
    live |= {
        f"worker {state}": count
        for state in EMPTY_STATES
        if (count := audit.counters[f"worker_entries_{state}"])
    }
    blocks = {k: v for k, v in audit.blocks_by_owner.items() if v}
    num_free = audit.blocks_by_state["free"]
    is_free = num_free == ENGINE.kv_cache.num_blocks
    return "" if is_free and not live else f"{live} {blocks}, {num_free} blocks free"


def _tail(told: Round, loads: list[Load]) -> str:
    lines = [f"  form {told.form}, seed {told.seed}"]
    lines += [f"  {deed}" for deed in told.deeds]
    for load in loads:
        lines += [f"  open: {each}" for each in load.history.open_ones()[:TAIL]]
        over = sorted((t for t in load.history.told if t.is_over), key=lambda t: t.ended_at_s)
        lines += [f"  {t.ended_at_s:.3f} {t}: {t.ends[0]!r}" for t in over[-TAIL:]]
    return "\n".join(lines)
