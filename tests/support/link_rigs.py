"""A real proxy and a real link of each form on virtual time; the peer is a script.

What stands here are the proxy, its books, the link with its channel, the world with its table and
roll, Ray's launcher with its driver's socket, and the watch over a real process. Scripted are the
words of ranks, broker and driver, and the worker's end of the lane. A rig's `see_death` makes a
death visible and lets no time pass.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from executor.attach.attached_link import AttachedLink
from executor.attach.caller import Place
from executor.attach.keys import AttachKeys
from executor.attach.messages import Attached
from executor.attach.point import AttachPoint
from executor.config import EngineConfig
from executor.engine.scripted import ScriptedEngine
from executor.lane import LaneSpec
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from executor.messages import Ready
from executor.owned_link import OwnedLink
from executor.proxy import Proxy
from executor.ray_link import RayLink
from executor.world.launch import LAUNCHER, Exit, Launcher
from executor.world.messages import RankHello, RankJoined, RankReady
from executor.world.orders import Orders, ProcessName, own_host, start_ticks
from executor.world.ray_launcher import RayLauncher
from executor.world.ray_messages import RankEnded
from tests.support.executor_forms import ranks
from tests.support.executor_scripted import config
from tests.support.virtual_loop import VirtualLoop

LIMITS = ExecutorLimits.of(EngineConfig())
"""As delivered."""
STEP_S = 0.05
ELSEWHERE = ProcessName(7, 7, "elsewhere/boot/pids")
IDENTITY = ScriptedEngine(config()).identity


class OpenSender:
    """The lane's requests are read at once. The socket behind it is only closed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sent: list[str] = []
        """Kinds of messages, in order."""

    def send(self, frame: Any) -> bool:
        self.sent.append(msgspec.msgpack.decode(frame)[0])
        return True

    def has_room(self) -> bool:
        return True

    def close(self) -> None:
        self.inner.close()


class ScriptedLauncher(Launcher):
    name = "scripted"

    def __init__(self) -> None:
        self.ended: list[Exit] = []
        self.on_exit: Callable[[], None] = lambda: None

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        self.num_ranks, self.on_exit = len(orders), on_exit

    def end(self, rank: int) -> None:
        self.ended.append(Exit(rank, f"rank {rank} ended by script"))
        self.on_exit()

    def exits(self) -> tuple[Exit, ...]:
        return tuple(self.ended)

    def kill(self) -> None:
        gone = [exit_.rank for exit_ in self.ended]
        for rank in range(self.num_ranks):
            if rank not in gone:
                self.end(rank)

    log_lines = ()

    def close(self) -> None: ...


class SeeingLauncher(ScriptedLauncher):
    """Like MPI's or spawn's: it is the ranks' parent, or hears of their end."""

    sees_ranks = True


class ScriptedDriver(RayLauncher):
    """Ray's launcher; the driver at the other end of its socket is the test."""

    async def launch(self, orders: Sequence[Orders], on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._socket, self.driver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._take)

    def say_ended(self, rank: int) -> None:
        self.driver.send(msgspec.msgpack.encode(RankEnded(rank, "its agent saw it end")))

    def kill(self) -> None:
        if not any(exit_.rank == LAUNCHER for exit_ in self._exits):
            self._exits.append(Exit(LAUNCHER, "killed"))
            self._loop.call_soon(self._on_exit)

    def close(self) -> None:
        super().close()
        self.driver.close()


class ScriptedCaller:
    """A frontend's side of the talk with the broker, without one."""

    num_bad_frames = 0

    def __init__(self, form: Any) -> None:
        keys = AttachKeys({"k": b"k" * 32})
        self.point = AttachPoint(form=form, endpoint="ipc:///none", keys=keys, where="there")
        self.world_ended = ""
        self.on_world_ended: Callable[[], None] = lambda: None
        self.deeds: list[str] = []

    def say_goodbye(self) -> None:
        self.deeds.append("goodbye")

    async def leave(self) -> bool:
        self.deeds.append("goodbye")
        return True

    def close(self) -> None:
        self.deeds.append("caller closed")

    def tell_end(self) -> None:
        self.world_ended = "the owner says that it is dead"
        self.on_world_ended()


@dataclass
class Rig:
    loop: VirtualLoop
    process: ProcessName
    """Rank 0's."""
    see_death: Callable[[], None] = lambda: None
    link: Any = None
    proxy: Any = None
    bound_s: float = 0.0
    """From the moment in which the death is seen to the answers, as the link states it."""

    @property
    def sender(self) -> OpenSender:
        return cast(OpenSender, self.link.requests._sender)

    def run(self, coroutine: Coroutine[Any, Any, Any], within_s: float = 10.0) -> Any:
        task = self.loop.create_task(coroutine)
        ends_at_s = self.loop.now_s + within_s
        self.loop.settle()
        while not task.done() and self.loop.now_s < ends_at_s:
            self.loop.pass_time(STEP_S)
        assert task.done(), f"not within {within_s} s"
        return task.result()

    def open(self, make_link: Callable[[LinkUser], Link], greet: Callable[[], None]) -> None:
        """Until the proxy is in use; `greet` is what the peer says to that end."""

        def make(user: LinkUser) -> Link:
            link = make_link(user)
            sender: Any = OpenSender(link.requests._sender)
            self.link, link.requests._sender = link, sender
            return link

        self.proxy = self.loop.do(lambda: Proxy(make, tokenizer=None, limits=LIMITS))
        starting = self.loop.create_task(self.proxy.start(lambda _: None))
        self.loop.settle()
        greet()
        for _ in range(40):  # the lane's own connection is waited for, and never comes
            self.loop.pass_time(STEP_S)
        self.ready()
        self.loop.settle()
        assert starting.done(), "it did not start"
        starting.result()

    def ready(self) -> None:
        """Of an attached link; a world's ranks say it themselves."""
        if isinstance(self.link, OwnedLink):
            for rank in range(self.link.world.num_ranks):
                message = RankReady(IDENTITY if rank == 0 else None)
                self.loop.do(self.link.world._on_message, rank, message)
        else:
            self.loop.do(self.link._on_messages, [Ready(IDENTITY)])


def _owned(rig: Rig, cls: type[OwnedLink], launcher: Callable[..., Launcher], num: int = 1) -> None:
    engine = config()
    executor = msgspec.structs.replace(engine.executor, world=ranks("auto", num))
    engine = msgspec.structs.replace(engine, executor=executor)

    class Scripted(cls):  # type: ignore[misc,valid-type]
        def make_launcher(self, config: EngineConfig) -> Launcher:
            return launcher()

    def greet() -> None:
        for rank in range(num):
            process = rig.process if rank == 0 else ELSEWHERE
            rig.loop.do(rig.link.world._on_message, rank, RankHello(process))
            if rank:
                rig.loop.do(rig.link.world._on_message, rank, RankJoined())

    rig.open(lambda user: Scripted(engine, name="rig", limits=LIMITS, user=user), greet)
    rig.bound_s = LIMITS.last_words_s


def _ray(rig: Rig) -> None:
    _owned(rig, RayLink, lambda: ScriptedDriver(config(), name="rig", limits=LIMITS))


def _attached(rig: Rig, form: str, folder: str) -> None:
    caller: Any = ScriptedCaller(form)
    spec = LaneSpec(
        frontend_id=1,
        key=b"k" * 32,
        requests_endpoint=f"ipc://{folder}/requests",
        results_endpoint=f"ipc://{folder}/results",
        worker_binds=True,
    )
    attached = Attached(b"", 1, "", "", rig.process, "", LIMITS.heartbeat_s, 0.0)
    place = Place(attached, spec, b"")
    rig.open(
        lambda user: AttachedLink(caller, place, name="rig", limits=LIMITS, user=user), lambda: None
    )


@contextlib.contextmanager
def opened(name: str) -> Iterator[Rig]:
    """By how the death of its world is seen: `NAMES`."""
    loop = VirtualLoop()
    child = subprocess.Popen(["/bin/sleep", "60"])
    here = ProcessName(child.pid, start_ticks(child.pid), own_host())
    rig = Rig(loop, ELSEWHERE if "elsewhere" in name else here)

    def kill() -> None:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    with tempfile.TemporaryDirectory() as folder:
        try:
            _build(rig, name, folder, kill)
            yield rig
        finally:
            if rig.proxy is not None:  # a socket that is left open would hang the interpreter
                rig.run(rig.proxy.shutdown())
            loop.end()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()


def _build(rig: Rig, name: str, folder: str, kill: Callable[[], None]) -> None:
    match name:
        case "ipc: its launcher tells":
            _owned(rig, OwnedLink, SeeingLauncher)
            rig.see_death = lambda: rig.loop.do(rig.link.world._launcher.end, 0)
        case "ipc: its pid":
            _owned(rig, OwnedLink, ScriptedLauncher)
            rig.see_death = kill
        case "ipc: a member, its launcher tells":
            _owned(rig, OwnedLink, SeeingLauncher, 2)
            rig.see_death = lambda: rig.loop.do(rig.link.world._launcher.end, 1)
        case "ray: its pid":
            _ray(rig)
            rig.see_death = kill
        case "ray elsewhere: its agent tells":
            _ray(rig)
            rig.see_death = lambda: rig.link.world._launcher.say_ended(0)
        case "attach: its pid" | "rpc: its pid":
            _attached(rig, name.partition(":")[0], folder)
            rig.see_death, rig.bound_s = kill, 0.4
        case "attach: the owner tells" | "rpc elsewhere: the owner tells":
            _attached(rig, name.partition(":")[0].split()[0], folder)
            rig.see_death = lambda: rig.loop.do(rig.link._caller.tell_end)
        case _:
            raise AssertionError(name)


NAMES = (
    "ipc: its launcher tells",
    "ipc: its pid",
    "ipc: a member, its launcher tells",
    "ray: its pid",
    "ray elsewhere: its agent tells",
    "attach: its pid",
    "attach: the owner tells",
    "rpc: its pid",
    "rpc elsewhere: the owner tells",
)
