"""A frontend in a process of its own, so that it can be killed beside others.

It is told where to attach on its standard input, serves clients of its own until that ends,
judges what they saw, and says it in one line. What happens to the world it is not told: any
death and any silence is a reason to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from typing import Any

from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint
from executor.executor import GenerationExecutor
from protos.errors import BatonError
from tests.soak.soak_forms import ENGINE, LIMITS
from tests.soak.soak_load import Load
from tests.support.attach_world import attached
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import CharTokenizer

NUM_CLIENTS = 30
END_S_MAX = 30.0


class FrontProcess:
    """start -> serving -> over (`end`: asked to leave, or killed meanwhile)."""

    def __init__(self, point: AttachPoint, seed: int) -> None:
        self._point = point
        self._seed = seed
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        process = self._process
        return 0 if process is None or process.returncode is not None else process.pid

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.soak.soak_front",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        point = self._point
        keys = {name: key.hex() for name, key in point.keys.keys.items()}
        orders = {"form": point.form, "endpoint": point.endpoint, "keys": keys, "seed": self._seed}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(orders).encode() + b"\n")
        line = await asyncio.wait_for(stdout.readline(), END_S_MAX)
        assert line == b"serving\n", "the frontend process did not come up"

    async def end(self, *, was_hurt: bool) -> None:
        """Raises AssertionError with what it has to complain of."""
        process = self._process
        if process is None:
            return
        try:
            if was_hurt:  # a stopped one never ends by itself
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            told, _ = await asyncio.wait_for(process.communicate(b""), END_S_MAX)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        assert was_hurt or process.returncode == 0, told.decode()
        assert was_hurt or told == b"well\n", told.decode()


async def serve(orders: dict[str, Any]) -> None:
    keys = {name: bytes.fromhex(key) for name, key in orders["keys"].items()}
    endpoint = orders["endpoint"]
    point = AttachPoint(
        form=orders["form"], endpoint=endpoint, keys=AttachKeys(keys), where=endpoint
    )
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
    try:
        with nothing_left():
            asyncio.run(serve(orders))
    except (AssertionError, BatonError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print("well", flush=True)


if __name__ == "__main__":
    main()
