"""Deaths, hangs and shutdowns of a real worker process; nothing may be left of any."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from executor.executor import GenerationExecutor
from executor.ipc import FrameSender
from executor.messages import Beat
from executor.proxy import Proxy
from protos.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    ServerUnavailableError,
)
from tests.support.executor_scripted import (
    CRASH,
    EXIT,
    audited,
    collect,
    config,
    request,
    running,
    tokens,
)

pytestmark = pytest.mark.system
SLOW = config(step_ms=5.0)


async def test_sigkill_fails_a_thousand_pending_within_a_second() -> None:
    """Guards: pending requests that hang, differ in their cause, or a submit taken after."""
    async with running(SLOW) as executor:
        results = [executor.submit(request(f"r{i}", max_tokens=1000)) for i in range(1000)]
        await anext(results[0])
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        killed_at_s = time.monotonic()
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert time.monotonic() - killed_at_s < 1.0
        assert len({id(end) for end in ends}) == 1  # one first cause for all
        cause = await executor.wait_dead()
        assert ends[0] is cause
        assert "SIGKILL" in str(cause)
        for _ in range(2):
            with pytest.raises(EngineDeadError) as refused:
                executor.submit(request("late"))
            assert refused.value is cause
            with pytest.raises(EngineDeadError):
                await anext(results[5])
        with pytest.raises(EngineDeadError):
            executor.check_health()
        with pytest.raises(EngineDeadError):
            await executor.load()
        assert executor.worker_pids == ()


async def submit_for_ever(executor: GenerationExecutor) -> None:
    while True:
        await collect(executor.submit(request("x")))


async def test_no_submit_is_accepted_between_death_and_its_notice() -> None:
    """Guards: a request that registers after the broadcast and then waits for ever."""
    async with running() as executor:
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await submit_for_ever(executor)
        await executor.wait_dead()


async def test_an_exception_in_step_is_told_with_its_cause_and_log() -> None:
    async with running(SLOW) as executor:
        other = executor.submit(request("other", max_tokens=1000))
        await anext(other)
        bad = executor.submit(request("bad", (1, CRASH)))
        for result in (bad, other):
            with pytest.raises(EngineDeadError, match="the engine crashes in this step"):
                await collect(result)
        assert "RuntimeError" in str(await executor.wait_dead())
        assert isinstance(executor, Proxy)
        assert any("Traceback" in line for line in executor.log_lines)


async def test_a_wordless_exit_is_told_by_its_status() -> None:
    async with running() as executor:
        with pytest.raises(EngineDeadError, match="exited with status 9"):
            await collect(executor.submit(request("x", (1, EXIT))))


async def test_a_failed_load_shows_the_real_error() -> None:
    """Guards: "the worker died" where the model's own message would help."""
    stages: list[str] = []
    with pytest.raises(ConfigError, match="no such weights"):
        await GenerationExecutor.create(
            config(load_error="no such weights"), name="x", progress=stages.append
        )
    assert len(stages) == 1


async def test_a_death_during_the_load_is_seen_at_once() -> None:
    """Guards: a start-up that waits its whole bound for a worker that is gone."""
    pids: list[int] = []

    def kill(stage: str) -> None:
        pids.append(int(stage.split()[2]))
        os.kill(pids[0], signal.SIGKILL)

    started_at_s = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await GenerationExecutor.create(config(load_ms=60_000), name="x", progress=kill)
    assert time.monotonic() - started_at_s < 5.0


async def test_no_file_is_there_while_the_model_loads() -> None:
    """A SIGKILL of the server in that long while left its socket folder in /tmp."""
    found: list[list[Path]] = []
    pattern = f"baton-ipc-{os.getpid()}-*"

    def look(stage: str) -> None:
        found.append(list(Path(tempfile.gettempdir()).glob(pattern)))
        os.kill(int(stage.split()[2]), signal.SIGKILL)

    with pytest.raises(EngineDeadError):
        await GenerationExecutor.create(config(load_ms=60_000), name="x", progress=look)
    assert found == [[]]


async def test_a_cancelled_start_leaves_nothing() -> None:
    """Guards: a Ctrl-C during a long load that orphans the worker."""
    loading = asyncio.Event()
    create = GenerationExecutor.create(
        config(load_ms=60_000), name="x", progress=lambda _: loading.set()
    )
    task = asyncio.create_task(create)
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_deadlines_hold_on_a_stopped_worker() -> None:
    """Guards a deadline that only the engine can enforce."""
    bounds = {"heartbeat_s": 0.1, "deadline_grace_s": 0.2, "stop_live_s_max": 0.5}
    async with running(SLOW, **bounds) as executor:
        os.kill(executor.worker_pids[0], signal.SIGSTOP)
        result = executor.submit(request("x", max_tokens=1000, deadline_s=0.4))
        with pytest.raises(DeadlineExceededError):
            await collect(result)


async def test_corrupt_and_unauthenticated_frames_are_dropped_by_the_worker() -> None:
    """Guards: a loop that dies of, or obeys, what does not bear our key."""
    async with running() as executor:
        assert isinstance(executor, Proxy)
        sender = executor._link.requests._sender
        assert isinstance(sender, FrameSender)
        socket, sealed = sender.socket, sender._sealer.seal(Beat())
        for frame in (b"", b"junk", b"\x00" * 4096, sealed, sealed, sealed[:-1] + b"!"):
            socket.send(frame)
        assert tokens(await collect(executor.submit(request())))
        assert (await audited(executor)).counters["worker_bad_frames"] == 5


async def test_a_message_that_the_worker_cannot_read_ends_its_lane() -> None:
    """It was counted and dropped: the request in it hung to its deadline. Then its world could
    not be told to stop: with the owner's lane it forgot the owner, and SIGTERM as well."""
    async with running(SLOW, stop_dead_s_max=60.0) as executor:
        assert isinstance(executor, Proxy)
        sender = executor._link.requests._sender
        assert isinstance(sender, FrameSender)
        result = executor.submit(request(max_tokens=1000))  # too long to overtake the lane's end
        assert sender.send({"a": 1})
        with pytest.raises(EngineDeadError, match="1 of its messages cannot be read"):
            await collect(result)
        await asyncio.wait_for(executor.shutdown(), 20)


async def test_a_graceful_sigterm_ends_the_worker() -> None:
    async with running(SLOW) as executor:
        result = executor.submit(request("x", max_tokens=1000))
        await anext(result)
        os.kill(executor.worker_pids[0], signal.SIGTERM)
        with pytest.raises(EngineDeadError, match="exited with status 0"):
            await collect(result)


async def test_the_terminals_sigint_does_not_reach_the_worker() -> None:
    async with running() as executor:
        os.kill(executor.worker_pids[0], signal.SIGINT)
        assert tokens(await collect(executor.submit(request())))


async def test_shutdown_twice_and_from_another_thread() -> None:
    """Guards: a second shutdown that hangs or raises; open requests without an answer."""
    async with running(SLOW) as executor:
        result = executor.submit(request("x", max_tokens=1000))
        await anext(result)
        thread = threading.Thread(target=executor.pre_shutdown)
        thread.start()
        with pytest.raises(ServerUnavailableError, match="shutting down"):
            await collect(result)
        thread.join()
        with pytest.raises(ServerUnavailableError, match="shutting down"):
            executor.submit(request("y"))
        await asyncio.gather(executor.shutdown(), executor.shutdown())
        await executor.shutdown()
        assert "shut down" in str(await executor.wait_dead())
        with pytest.raises(EngineDeadError, match="shut down"):
            executor.submit(request("z"))


PARENT = """
import asyncio, sys
from tests.support.executor_scripted import config, running
async def main():
    async with running(config(step_ms=1.0)) as executor:
        print(executor.worker_pids[0], flush=True)
        await asyncio.sleep(60)
def run():
    asyncio.run(main())
if sys.argv[1] == "thread":
    import threading
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_the_worker_dies_with_its_parent(where: str) -> None:
    """Guards: an orphaned worker that holds its memory for ever."""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, where], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, _ = psutil.wait_procs([worker], timeout=5)
    assert gone
    assert not list(Path(tempfile.gettempdir()).glob(f"baton-ipc-{parent.pid}-*"))
