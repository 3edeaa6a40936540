"""A frontend in a process of its own, so that it can be killed beside others.

It is told where to attach on its standard input, serves clients of its own until that ends,
judges what they saw, and says it in one line. What happens to the world it is not told: any
death and any silence is a reason to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from executor.attach.point import AttachPoint
from executor.executor import GenerationExecutor
from protos.errors import BatonError
from tests.soak.soak_child import Child
from tests.soak.soak_forms import ENGINE, LIMITS
from tests.soak.soak_load import Load
from tests.soak.soak_owner import point_of, point_to
from tests.support.attach_world import attached
from tests.support.executor_baseline import mark_anew, nothing_left
from tests.support.executor_scripted import CharTokenizer

NUM_CLIENTS = 30


def front_process(point: AttachPoint, seed: int) -> Child:
    return Child(__name__, {**point_to(point), "seed": seed})


async def serve(orders: dict[str, Any]) -> None:
    point = point_of(orders)
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with attached(point, engine=ENGINE, tokenizer=CharTokenizer(), **LIMITS) as (executor,):
        load = Load(executor, orders["seed"])
        load.history.silences.append((0, 0.0, float("inf")))
        while not over.done() and _is_well(executor):
            await load.run(NUM_CLIENTS, 0.3)
            if load.history.told and load.history.told[0].is_over:
                _say_once("serving")
        if executor_is_dead(executor):
            load.history.deaths[0] = 0.0
        _say_once("serving")
        load.history.check()
        assert not load.history.open_ones()
        await over


def executor_is_dead(executor: Any) -> bool:
    return bool(executor._link.dead.done())


def _is_well(executor: GenerationExecutor) -> bool:
    try:
        executor.check_health()
    except BatonError:
        return not executor_is_dead(executor)
    return True


_said: list[str] = []


def _say_once(word: str) -> None:
    if word not in _said:
        _said.append(word)
        print(word, flush=True)


def main() -> None:
    orders = json.loads(sys.stdin.readline())
    logging.disable(logging.CRITICAL)  # deaths are told at length
    mark_anew()  # what it starts is its own, and what others do not
    try:
        with nothing_left():
            asyncio.run(serve(orders))
    except (AssertionError, BatonError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print("well", flush=True)


if __name__ == "__main__":
    main()
