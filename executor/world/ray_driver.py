"""`python -m executor.world.ray_driver`: the Ray driver of one world, a child of its owner.

In a process of its own, because Ray takes a driver's signals, environment, threads and
descriptors for itself and does not give all of them back.

Life: orders by standard input, the cluster joined or started, one actor a rank placed, their
news handed on; it ends when every rank has ended, or with its parent. A cluster of our own is
in our process group, which is killed after us, or by us where the parent is gone; in somebody
else's the actors end, as their job does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from executor.parent import EXIT_PARENT_GONE
from executor.world.ray_agent import RankAgent
from executor.world.ray_messages import (
    DriverEvent,
    DriverOrders,
    Joined,
    Placed,
    RankEnded,
    Refused,
    read_driver_orders,
)
from protos.errors import ConfigError, text_of

RANK_MODULE = "executor.world.ray_rank"
OBJECT_STORE_BYTES = 80 << 20
"""About the least that Ray takes: nothing of ours goes through it."""
CALLS_AT_ONCE = 2
DYING_S = 0.2
"""From SIGKILL until a process writes no more files."""
AFTER_DEATH_S = 1.0
"""Our own end is no part of a rank's death: the owner, who ends us then, hears of that first."""


class Driver:
    """`ray` is the module, which takes seconds to import."""

    def __init__(self, ray: Any, orders: DriverOrders, events: socket.socket) -> None:
        self._ray = ray
        self._orders = orders
        self._events = events
        self._all_clean = True

    def run(self) -> int:
        try:
            self._join()
            self._say(Joined())
            agents = self._place()
        except ConfigError as error:
            self._say(Refused(error.field or "", error.message))
            return 1
        self._say(Placed())
        watches = [
            threading.Thread(target=self._watch, args=(rank, agent), daemon=True)
            for rank, agent in enumerate(agents)
        ]
        for watch in watches:
            watch.start()
        for watch in watches:
            watch.join()
        if not self._all_clean:
            time.sleep(AFTER_DEATH_S)
        if self._orders.address:
            self._ray.shutdown()
        return 0

    def _join(self) -> None:
        orders, num_ranks = self._orders, len(self._orders.ranks)
        if orders.address:
            options: dict[str, Any] = {"address": orders.address}
        else:
            options = {
                "address": "local",
                "num_cpus": num_ranks * orders.num_cpus_per_rank,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": orders.folder,
            }
        try:
            self._ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:
            what = f"joined at {orders.address}" if orders.address else "started on this host"
            words = f"no Ray cluster could be {what}: {type(error).__name__}: {_first_line(error)}"
            if orders.address:
                words += " (RAY_AUTH_MODE and the like are taken from the environment)"
            raise ConfigError(words, field="executor.ray_address") from error

    def _place(self) -> list[Any]:
        """Raises ConfigError where there is no room."""
        self._check_room()
        num_ranks = len(self._orders.ranks)
        agent_class = self._ray.remote(RankAgent).options(
            num_cpus=self._orders.num_cpus_per_rank,
            num_gpus=self._orders.num_gpus_per_rank,
            max_concurrency=CALLS_AT_ONCE,
            max_restarts=0,
        )
        agents = [agent_class.remote() for _ in range(num_ranks)]
        started = [
            agent.start.remote(RANK_MODULE, orders, _kind(rank, num_ranks))
            for rank, (agent, orders) in enumerate(zip(agents, self._orders.ranks, strict=True))
        ]
        try:
            self._ray.get(started, timeout=self._orders.place_s_max)
        except self._ray.exceptions.GetTimeoutError:
            raise self._no_room(
                f"found no place within {self._orders.place_s_max:g} s; "
                f"free are {_amounts(self._ray.available_resources())}"
            ) from None
        except Exception as error:
            words = f"an actor could not start its rank: {_first_line(error)}"
            raise ConfigError(words, field="executor.ray_address") from error
        return agents

    def _check_room(self) -> None:
        """What the whole cluster does not have is not worth waiting for."""
        total = self._ray.cluster_resources()
        num_ranks = len(self._orders.ranks)
        needed = {
            "CPU": num_ranks * self._orders.num_cpus_per_rank,
            "GPU": num_ranks * self._orders.num_gpus_per_rank,
        }
        if any(total.get(name, 0) < amount for name, amount in needed.items()):
            raise self._no_room(f"but the Ray cluster has {_amounts(total)}")

    def _no_room(self, why: str) -> ConfigError:
        orders, num_gpus = self._orders, self._orders.num_gpus_per_rank
        each = f"{orders.num_cpus_per_rank} CPU" + (f" and {num_gpus} GPU" if num_gpus else "")
        words = f"{len(orders.ranks)} rank(s) of {each} each are asked for, {why}"
        return ConfigError(words, field="executor.world.num_ranks")

    def _watch(self, rank: int, agent: Any) -> None:
        """On a thread of its own; whoever does not answer is judged by his rank's heartbeat."""
        prefix = "" if len(self._orders.ranks) == 1 else f"rank {rank}: "
        while True:
            try:
                lines, end, is_clean = self._ray.get(agent.news.remote())
            except Exception as error:
                self._all_clean = False
                end = f"the Ray actor of rank {rank} is gone: {_first_line(error)}"
                self._say(RankEnded(rank, end))
                return
            for line in lines:
                print(f"{prefix}{line}", flush=True)  # noqa: T201 - the owner keeps it
            if end:
                self._all_clean = self._all_clean and is_clean
                self._say(RankEnded(rank, end))
                return

    def _say(self, event: DriverEvent) -> None:
        self._events.send(msgspec.msgpack.encode(event))


def _kind(rank: int, num_ranks: int) -> str:
    return "worker" if num_ranks == 1 else f"worker of rank {rank}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal group's, so the owner's to judge
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    orders = read_driver_orders(sys.stdin.buffer)
    threading.Thread(target=_watch_owner, args=(orders,), name="owner-watch", daemon=True).start()
    import ray

    status = Driver(ray, orders, socket.socket(fileno=orders.events_fd)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread may keep us alive


def _watch_owner(orders: DriverOrders) -> None:
    while os.read(0, 4096):
        pass
    if not orders.address:
        _end_cluster(orders.folder)
    os._exit(EXIT_PARENT_GONE)


def _end_cluster(folder: str) -> None:
    """Ours, with its folder: nobody else is there to remove it."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.getpgid(int(name)) == os.getpgid(0) != int(name):
                os.kill(int(name), signal.SIGKILL)
    time.sleep(DYING_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
