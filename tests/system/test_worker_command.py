"""`baton worker` as an operator starts it, and frontends that attach to it over tcp.

The bound for one host: open requests end within 1 s of rank 0's death, and so they do when the
command itself is killed, since rank 0 ends with it. Tests allow five times as much.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from common.security import ClusterSecret, create_secret, load_secret
from executor.attach.point import AttachPoint, rpc_point
from executor.config import EngineConfig, ExecutorConfig
from executor.executor import GenerationExecutor
from executor.limits import ExecutorLimits
from executor.result import GenerationResult
from generation_server.service import GenerationRole
from protos import inference_pb2 as pb
from protos.errors import EngineDeadError
from protos.tokens import pack_token_ids
from serving.run import ServerProcess
from tests.support.attach_world import attached, shared_world
from tests.support.executor_baseline import nothing_left
from tests.support.executor_scripted import collect, request, tokens
from tests.support.serving_double import running_server
from tests.support.worlds import ranked

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
NUM_PENDING = 1000
BOUND_S = 1.0
TIMES_ALLOWED = 5


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    with nothing_left():
        yield


class Command:
    """`python -m executor.attach.worker_server`, which is `baton worker`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "secret").exists():
            create_secret(folder / "secret")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, script: str = "step_ms: 5") -> None:
        config = self.folder / "worker.yaml"
        config.write_text(
            f"secret_file: {self.folder / 'secret'}\n"
            f"engine: {{engine: scripted, scripted: {{{script}}}}}\n"
        )
        reader, writer = os.pipe()
        command = (sys.executable, "-m", "executor.attach.worker_server", "--config", str(config))
        flags = ("--listen", self.address, "--ready-fd", str(writer))
        with (self.folder / "log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, *flags, cwd=ROOT, stdout=log, stderr=log, pass_fds=(writer,)
            )
        os.close(writer)
        with os.fdopen(reader) as ready:
            line = await asyncio.to_thread(ready.readline)
            assert line == f"READY {self.address}\n", self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def point(self, secret: ClusterSecret | None = None) -> AttachPoint:
        engine = EngineConfig(executor=ExecutorConfig(rpc_address=self.address))
        point = rpc_point(engine, secret or load_secret(self.folder / "secret"))
        assert point is not None
        return point

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), 15)
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
        assert not alive
        return code


@pytest.fixture
async def command(tmp_path: Path) -> AsyncIterator[Command]:
    command = Command(tmp_path)
    yield command
    if command.process is not None and command.process.returncode is None:
        command.process.kill()
        await command.process.wait()


async def all_pending(fronts: list[GenerationExecutor]) -> list[GenerationResult]:
    """The first one streams before the others come: which frontend's are read first nobody
    promises, and behind two frontends' hundreds it met its deadline now and then."""
    first = fronts[0].submit(request("r0", max_tokens=5000))
    await anext(first)
    return [first] + [
        fronts[i % 3].submit(request(f"r{i}", max_tokens=5000)) for i in range(1, NUM_PENDING)
    ]


@pytest.mark.parametrize("who", ["rank 0", "the command"])
async def test_a_death_is_seen_by_all_that_are_attached(who: str, command: Command) -> None:
    """With 1,000 requests pending on three frontends; one cause for each, sticky."""
    await command.start()
    async with attached(command.point(), 3) as fronts:
        results = await all_pending(fronts)
        (pid,) = fronts[0].worker_pids
        if who == "rank 0":
            os.kill(pid, signal.SIGKILL)
        else:
            assert command.process is not None
            command.process.kill()
        killed_at_s = time.monotonic()
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert time.monotonic() - killed_at_s < TIMES_ALLOWED * BOUND_S
        assert {type(end) for end in ends} == {EngineDeadError}
        causes = [await front.wait_dead() for front in fronts]
        assert {str(end) for end in ends} == {str(cause) for cause in causes}
        if who == "rank 0":
            assert "killed by SIGKILL" in str(causes[0])  # the owner's word, not only a pidfd's
        for front in fronts:
            assert front.worker_pids == ()
            with pytest.raises(EngineDeadError):
                front.submit(request("late"))
    assert command.process is not None
    code = await asyncio.wait_for(command.process.wait(), 15)
    assert code == (70 if who == "rank 0" else -signal.SIGKILL)


@pytest.mark.parametrize("form", ["attach", "rpc"])
async def test_the_death_of_any_rank_is_told_to_all_with_its_name(form: str) -> None:
    """No frontend sees the other ranks: the owner does, and says which it was."""
    async with (
        shared_world(ranked("spawn", 2, step_ms=2.0), form=form) as world,
        attached(world.point, 3) as fronts,
    ):
        results = await all_pending(fronts)
        member = world.owner.worker_pids[1]
        os.kill(member, signal.SIGKILL)
        killed_at_s = time.monotonic()
        ends = await asyncio.gather(*map(collect, results), return_exceptions=True)
        assert time.monotonic() - killed_at_s < TIMES_ALLOWED * BOUND_S
        (told,) = {str(end) for end in ends}
        assert f"rank 1 (process {member}) was killed by SIGKILL" in told


async def test_sigterm_lets_run_what_is_short_and_tells_the_rest(command: Command) -> None:
    await command.start("step_ms: 20")
    async with attached(command.point(), 2) as (one, other):
        short = one.submit(request("short", max_tokens=5))
        long = other.submit(request("long", max_tokens=5000))
        await anext(long)
        end = asyncio.create_task(command.end(signal.SIGTERM))
        assert len(tokens(await collect(short))) == 5
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await collect(long)
        assert await end == 0
    assert "Traceback" not in command.log()


async def test_it_is_waited_for_and_what_comes_after_it_is_attached_anew(command: Command) -> None:
    """A server may start before its worker; a dead executor stays dead, a new one attaches."""
    create = asyncio.create_task(
        GenerationExecutor.create(EngineConfig(), name="early", point=command.point())
    )
    await asyncio.sleep(0.3)
    await command.start()
    first = await create
    assert len(tokens(await collect(first.submit(request(max_tokens=5))))) == 5
    assert await command.end(signal.SIGKILL) == -signal.SIGKILL
    await asyncio.wait_for(first.wait_dead(), TIMES_ALLOWED * BOUND_S)
    await command.start()
    async with attached(command.point()) as (second,):
        assert len(tokens(await collect(second.submit(request(max_tokens=5))))) == 5
        with pytest.raises(EngineDeadError):
            first.submit(request("late"))
    await first.shutdown()
    assert await command.end(signal.SIGTERM) == 0


async def test_another_clusters_secret_is_told_by_name(command: Command) -> None:
    await command.start()
    wrong = command.point(ClusterSecret({"k": b"w" * 32}))
    with pytest.raises(EngineDeadError, match="its secret file is another cluster's"):
        await GenerationExecutor.create(
            EngineConfig(), name="x", point=wrong, limits=ExecutorLimits(hello_s_max=0.5)
        )
    assert await command.end(signal.SIGTERM) == 0
    assert "bad_frames=0" not in command.log()


async def test_servers_serve_by_an_engine_elsewhere(command: Command, tmp_path: Path) -> None:
    """Two whole servers on one worker: `engine.executor.rpc_address` is all that they need; a
    model of their own only for their tokenizer."""
    await command.start()
    engine = EngineConfig(executor=ExecutorConfig(rpc_address=command.address))
    ask = pb.GenerateRequest(
        token_ids=pack_token_ids((1, 2, 3)), sampling=pb.SamplingParams(max_tokens=9, seed=5)
    )
    answers = []
    for _ in range(2):
        async with running_server(
            GenerationRole, tmp_path, process_type=ServerProcess, engine=engine
        ) as server:
            messages = await server.generate(ask)
            answers.append([token for message in messages for token in message.token_ids])
            assert server.process.state.info().incarnation != 0
    assert answers[0] == answers[1]
    assert len(answers[0]) == 9
    assert await command.end(signal.SIGTERM) == 0
