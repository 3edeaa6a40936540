"""A process that owns a world, so that it can be killed: who owns one dies as anybody.

Told the name of a form that frontends attach to, it says where they can, and waits. Of any
other form it is the server itself: it serves clients of its own, says "serving" after the first
answer, and goes on. SIGTERM and the end of its input are its orderly end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint
from executor.ipc import sweep_folders
from protos.errors import BatonError
from tests.soak.soak_child import Child
from tests.soak.soak_forms import ENGINE, LIMITS, SHARED, opened
from tests.soak.soak_load import Load
from tests.soak.soak_nemesis import Deed
from tests.support.attach_world import shared_world

NUM_CLIENTS = 30
END_S_MAX = 20.0
"""Its load goes on to its end first."""


def owner_process(form: str, seed: int, cluster: str) -> Child:
    return Child(__name__, {"form": form, "seed": seed, "cluster": cluster})


def point_to(point: AttachPoint) -> dict[str, Any]:
    keys = {name: key.hex() for name, key in point.keys.keys.items()}
    return {"form": point.form, "endpoint": point.endpoint, "keys": keys}


def point_of(orders: dict[str, Any]) -> AttachPoint:
    keys = {name: bytes.fromhex(key) for name, key in orders["keys"].items()}
    endpoint = orders["endpoint"]
    return AttachPoint(
        form=orders["form"], endpoint=endpoint, keys=AttachKeys(keys), where=endpoint
    )


async def play_owner(form: str, seed: int, deed: Deed, cluster: str) -> None:
    """Hurt the server itself. Whoever looks afterwards must find nothing of it."""
    owner = owner_process(form, seed, cluster)
    try:
        await owner.spawn()
        if deed.kind != "kill early":
            assert await owner.first_word() == "serving"
        await asyncio.sleep(deed.after_s)
        deed.pid, deed.done_at_s = owner.pid, time.monotonic()
        os.kill(owner.pid, signal.SIGTERM if deed.kind == "term" else signal.SIGKILL)
        status, told = await owner.ended(END_S_MAX)
        if deed.kind == "term":
            assert (status, told) == (0, "well\n"), f"{status} {told}"
    finally:
        await owner.end(was_hurt=True)
    assert not (left := _folders_of(deed.pid)), f"its folders: {left}"


def _folders_of(pid: int) -> list[Path]:
    """Those that the next one of us would not remove either."""
    sweep_folders()
    return list(Path(tempfile.gettempdir()).glob(f"baton-*-{pid}-*"))


async def own(orders: dict[str, Any]) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    loop.add_reader(sys.stdin.fileno(), over.set)
    try:
        if orders["form"] in SHARED:
            await _share(orders["form"], over)
        else:
            await _serve(orders, over)
    finally:
        loop.remove_reader(sys.stdin.fileno())
        loop.remove_signal_handler(signal.SIGTERM)


async def _share(form: str, over: asyncio.Event) -> None:
    async with shared_world(ENGINE, form=SHARED[form].how, **LIMITS) as world:
        print(json.dumps(point_to(world.point)), flush=True)
        await over.wait()


async def _serve(orders: dict[str, Any], over: asyncio.Event) -> None:
    async with opened(orders["form"], lambda: orders["cluster"]) as executor:
        load = Load(executor, orders["seed"])
        await load.run(1, 0.0)
        print("serving", flush=True)
        while not over.is_set():
            await load.run(NUM_CLIENTS, 0.3)
        load.history.check()


def main() -> None:
    orders = json.loads(sys.stdin.buffer.readline())
    logging.disable(logging.CRITICAL)  # deaths are told at length
    try:
        asyncio.run(own(orders))
    except (AssertionError, BatonError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print("well", flush=True)


if __name__ == "__main__":
    main()
