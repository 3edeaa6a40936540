"""The Ray form's own: a cluster of ours that comes and goes, refusals, and deaths inside Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from executor.config import EngineConfig, ExecutorConfig, WorldConfig
from executor.executor import GenerationExecutor
from executor.health import HealthBounds
from executor.world import ray_launcher
from protos.errors import ConfigError, EngineDeadError, ServerUnavailableError
from tests.support import ray_cluster
from tests.support.executor_scripted import collect, config, request, running, tokens
from tests.support.processes import command_of

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
TIMES_ALLOWED = 5
NUM_PENDING = 1000
UCX = {"tls": "tcp,self,posix,cma", "net_devices": ""}
SLOW = config(step_ms=1.0, num_blocks=20_000)


def on_ray(engine: EngineConfig = SLOW, num_ranks: int = 1, address: str = "") -> EngineConfig:
    world = WorldConfig(num_ranks=num_ranks)
    executor = ExecutorConfig(form="ray", ray_address=address, world=world)
    return msgspec.structs.replace(engine, executor=executor)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_cluster.Cluster]:
    with ray_cluster.started() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def address(cluster: ray_cluster.Cluster) -> str:
    return cluster.address


def process_named(word: str, root: int | None = None) -> psutil.Process:
    """The one of our descendants, or of the root's, whose command has this word."""
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            if word in command_of(process):
                return process
    raise AssertionError(f"no process has {word}")


async def assert_dies(executor: GenerationExecutor, kill: Callable[[], None]) -> None:
    """All that is pending ends with the world, in time."""
    results = [executor.submit(request(f"r{i}", max_tokens=5000)) for i in range(NUM_PENDING)]
    await anext(results[0])
    kill()
    async with asyncio.timeout(TIMES_ALLOWED * 1.0):
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
    assert {type(end) for end in ends} == {EngineDeadError}


# --- a cluster of our own ----------------------------------------------------------


async def test_two_ranks_in_a_cluster_of_our_own_that_goes_with_them() -> None:
    """UCX opens in every rank; Ray is not let into this process, its environment, or the
    user's home."""
    environment = dict(os.environ)
    home = Path.home() / ".ray"
    had_home = home.exists()
    async with running(on_ray(num_ranks=2)) as executor:
        assert len(executor.worker_pids) == 2
        assert len(tokens(await collect(executor.submit(request())))) == 4
        checked = await executor.collective_rpc("check_transport", **UCX)
        assert [bool(facts["wires"]) for facts in checked] == [True, True]
        assert process_named("baton-ray-").is_running()  # the cluster's, in our folder
    assert dict(os.environ) == environment
    assert home.exists() == had_home
    assert "ray" not in sys.modules


OWNER = """
import asyncio, sys
from tests.support.executor_scripted import request, running
from tests.system.test_executor_ray import on_ray

async def main():
    async with running(on_ray()) as executor:
        await anext(executor.submit(request(max_tokens=5000)))
        print("serving", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_cluster_goes_when_its_owner_is_killed() -> None:
    """And so does its folder, which nobody else would remove."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().strip() == "serving"
        (folder,) = Path(tempfile.gettempdir()).glob(f"baton-ray-{owner.pid}-*")
        owner.kill()
    ends_at_s = time.monotonic() + TIMES_ALLOWED
    while folder.exists() and time.monotonic() < ends_at_s:
        time.sleep(0.02)
    assert not folder.exists()


# --- refusals ----------------------------------------------------------------------


async def test_no_cluster_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "JOIN_S_MAX", 3.0)
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 did not come up within 3 s"):
        async with running(on_ray(address="127.0.0.1:9")):
            pass
    assert time.monotonic() - started_s < TIMES_ALLOWED * 3.0


async def test_more_ranks_than_the_cluster_has_processors(address: str) -> None:
    with pytest.raises(ConfigError, match=r"3 rank\(s\) of 1 CPU each .* has 2 CPU"):
        async with running(on_ray(num_ranks=3, address=address)):
            pass


async def test_processors_that_others_hold(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: waiting for ever, without a word, for room in a busy cluster."""
    monkeypatch.setattr(ray_launcher, "PLACE_S_MAX", 1.0)
    async with running(on_ray(num_ranks=2, address=address)):
        with pytest.raises(ConfigError, match=r"found no place within 1 s; free are 0 CPU"):
            async with running(on_ray(address=address)):
                pass


async def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        assert name == "ray"

    monkeypatch.setattr("importlib.util.find_spec", find_nothing)
    with pytest.raises(ConfigError, match=r"\[ray\]"):
        async with running(on_ray()):
            pass


async def test_a_failed_load_shows_the_ranks_own_error(address: str) -> None:
    broken = config(load_error="there is no such disk")
    with pytest.raises(ConfigError, match="there is no such disk"):
        async with running(on_ray(broken, address=address)):
            pass


# --- deaths ------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["RankAgent", "ray_driver"])
async def test_the_death_of_what_stands_between(address: str, victim: str) -> None:
    """The actor takes its rank along, the driver its actors; nothing is orphaned."""
    async with running(on_ray(address=address)) as executor:
        await assert_dies(executor, lambda: process_named(victim).kill())


async def test_a_rank_that_stands_still_is_given_up_and_killed(address: str) -> None:
    """A stopped process hears of no pipe's end: only a signal that cannot be held off ends it."""
    health = HealthBounds(silence_s=0.5, stall_s=30.0, give_up_s=1.0)
    async with running(on_ray(address=address), health=health, heartbeat_s=0.1) as executor:
        result = executor.submit(request(max_tokens=5000))
        await anext(result)
        os.kill(executor.worker_pids[0], signal.SIGSTOP)
        async with asyncio.timeout(TIMES_ALLOWED * health.silence_s):
            with pytest.raises(ServerUnavailableError, match="has said nothing"):
                await collect(result)
        async with asyncio.timeout(TIMES_ALLOWED * health.give_up_s):
            await executor.wait_dead()


async def test_the_death_of_a_node(cluster: ray_cluster.Cluster) -> None:
    """Its raylet is killed, and with it all that Ray has started there. The last test: nobody
    uses this cluster again."""

    def kill() -> None:
        process_named("raylet/raylet", cluster.pid).kill()

    async with running(on_ray(address=cluster.address)) as executor:
        await assert_dies(executor, kill)
