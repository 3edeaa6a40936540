"""Proxies and the worker's loop over the scripted engine, wired by hand in one thread.

No process and no socket: each lane's messages wait in two lists until somebody
delivers them, time is a variable, and whatever may break does so on demand. What
stands here are the real proxies, links' death handling, books, worker, ledgers
and engine; replaced are the frames between them and the world's processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from executor.config import EngineConfig, KvCacheConfig, SchedulerConfig, ScriptedConfig
from executor.engine.scripted import ScriptedEngine
from executor.engine.scripted_model import scripted_completion
from executor.engine.seam import EngineOutput, EngineRequest
from executor.health import HealthBounds
from executor.inbox import Inbox, LaneEnded
from executor.lane import OWNER_ID
from executor.limits import ExecutorLimits
from executor.link import Link, LinkUser
from executor.messages import Batch, Cancel, Died, Heartbeat, LaneClosed, Submit, ToProxy, ToWorker
from executor.proxy import Proxy
from executor.request_queue import RequestQueue
from executor.worker import Worker
from protos.errors import InternalError
from protos.tokens import pack_token_ids
from tests.support.executor_scripted import CharTokenizer
from tests.support.virtual_loop import VirtualLoop

QUEUE_MAX = 4
BACKLOG_MAX = 6
TOMBSTONES_MAX = 16
HEARTBEAT_S, SILENCE_S, GRACE_S, LAST_WORDS_S = 1.0, 3.0, 1.0, 0.1
LEASE_S = 10.0
REFUSED_ID, MAX_QUEUED = 77, 6
CONFIG = EngineConfig(
    engine="scripted",
    kv_cache=KvCacheConfig(num_blocks=16, tokens_per_block=4),
    scheduler=SchedulerConfig(max_sequences=3, max_queued=MAX_QUEUED),
    scripted=ScriptedConfig(refuse_token_id=REFUSED_ID, vocab_size=500),
)
LIMITS = ExecutorLimits(
    heartbeat_s=HEARTBEAT_S,
    health=HealthBounds(silence_s=SILENCE_S, stall_s=1e6, give_up_s=1e9),
    deadline_grace_s=GRACE_S,
    last_words_s=LAST_WORDS_S,
    tombstones_max=TOMBSTONES_MAX,
)


BRITTLE_ID = scripted_completion(pack_token_ids((3,) * 5), 7, 1, CONFIG.scripted)[0]
"""No text can be made of it."""


class BrittleTokenizer(CharTokenizer):
    def decode(self, token_ids: Sequence[int]) -> str:
        if BRITTLE_ID in token_ids:
            raise ValueError(f"no text for {BRITTLE_ID}")
        return super().decode(token_ids)


class BreakableEngine:
    """The scripted engine, which breaks when it is told to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._engine = ScriptedEngine(CONFIG, clock=clock, sleep=lambda _: None)
        self.breaks_in = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: EngineRequest) -> None:
        self._break_in("submit")
        self._engine.submit(request)

    def step(self) -> list[EngineOutput]:
        outputs = self._engine.step()
        self._break_in("step")  # what this step said is lost with it
        return outputs

    def _break_in(self, where: str) -> None:
        if self.breaks_in == where:
            raise RuntimeError(f"broken in {where}")


class Line:
    """Stands where the socket to the worker stands: bounded and ordered."""

    def __init__(self, on_sent: Callable[[ToWorker], None]) -> None:
        self.messages: deque[ToWorker] = deque()
        self.is_cut = False
        self._on_sent = on_sent

    def send(self, frame: Any) -> bool:
        if not self.has_room():
            return False
        for message in frame.messages if isinstance(frame, Batch) else (frame,):
            self._on_sent(message)
            self.messages.append(message)
        return True

    def has_room(self) -> bool:
        return not self.is_cut and len(self.messages) < QUEUE_MAX

    def close(self) -> None:
        self.cut()

    def cut(self) -> None:
        """Nobody reads it any more."""
        self.messages.clear()
        self.is_cut = True


class HandLink(Link):
    """A link whose world lives in this thread; the owner's sees its death ahead of the loop."""

    form = "hand"

    def __init__(self, world: FaultWorld, frontend_id: int, user: LinkUser, batch_max: int) -> None:
        super().__init__("hand", LIMITS, user)
        self.frontend_id = frontend_id
        self.shares_engine = frontend_id != OWNER_ID
        self._world = world
        self.line = Line(self._on_sent)
        self.slots: Callable[[str], int | None] = lambda _: None
        self.requests = RequestQueue(self.line, batch_max=batch_max, batch_s=0.01, loop=self.loop)

    def _on_sent(self, message: ToWorker) -> None:
        """Invariant 2: whoever answers at once must find a place for the answer. A request
        that was given up while its frame was gathered may still leave."""
        if isinstance(message, Submit) and len(self.requests) == 0:
            slot = self.slots(message.external_id)
            assert slot == message.request.request_id, "sent before it was registered"

    async def start(self, progress: Callable[[str], None]) -> None:
        self.on_ready(self._world.engine.identity)

    async def stop(self, *, is_well: bool) -> tuple[str, ...]:
        self.cut()
        return ()

    def cut(self) -> None:
        self.declare_dead("it was shut down")

    def kill(self) -> None:
        self._world.kill()

    def has_exited(self) -> bool:
        return self.frontend_id == OWNER_ID and self._world.is_dead

    def describe_death(self) -> Sequence[str]:
        return ("the hand's world is dead",)

    pids = ()


class Frontend:
    """One proxy and its lane's two lists."""

    link: HandLink

    def __init__(self, world: FaultWorld, frontend_id: int) -> None:
        self.frontend_id = frontend_id
        self.to_proxy: deque[ToProxy] = deque()
        self.is_open = True
        self.last_words = ""
        self.heard_at_s = world.loop.time()
        self.batches = frontend_id % 2 == 1

        def make_link(user: LinkUser) -> Link:
            self.link = HandLink(world, frontend_id, user, 3 if self.batches else 1)
            return self.link

        tokenizer: Any = BrittleTokenizer()
        self.proxy = Proxy(make_link, tokenizer=tokenizer, limits=LIMITS)
        self.link.slots = self.proxy.find


class FaultWorld:
    """Everything a machine may do to them. Stands where `Lanes` stands for the worker."""

    num_bad_frames = num_unsaid = 0

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.engine = BreakableEngine(self.loop.time)
        self.inbox = Inbox(1024)
        self.worker = Worker(
            cast(Any, self.engine),
            self.inbox,
            self,
            tombstones_max=TOMBSTONES_MAX,
        )
        self.frontends: dict[int, Frontend] = {}
        self.is_dead = False

    # --- lanes -------------------------------------------------------------------

    def attach(self) -> Frontend:
        frontend = self.loop.do(Frontend, self, len(self.frontends))
        self.frontends[frontend.frontend_id] = frontend
        self.loop.finish(frontend.proxy.start(lambda _: None))
        return frontend

    def close_lane(self, frontend_id: int, why: str = "by hand") -> None:
        """By the worker's side; what is on its way to the proxy still comes."""
        frontend = self.frontends[frontend_id]
        frontend.is_open = False
        frontend.to_proxy.append(LaneClosed(why))
        self.inbox.tell(frontend_id, LaneEnded(why))

    def all(self) -> list[Frontend]:
        return list(self.frontends.values())

    def pick(self, number: int) -> Frontend:
        return self.frontends[number % len(self.frontends)]

    # --- what the worker's loop says ---------------------------------------------

    def greet(self, greeting: Any) -> None: ...

    def flush(self) -> bool:
        return True

    def say(self, frontend_id: int, message: ToProxy) -> bool:
        frontend = self.frontends[frontend_id]
        if frontend.is_open:
            frontend.to_proxy.append(message)
            if frontend_id != OWNER_ID and len(frontend.to_proxy) > BACKLOG_MAX:
                self.close_lane(frontend_id, "it does not read its answers")
        return True

    # --- deeds ---------------------------------------------------------------------

    def take(self, frontend: Frontend, num_messages: int) -> None:
        """The worker's receiving thread reads. A closed lane's socket may be read once more."""
        line = frontend.link.line
        for _ in range(min(num_messages, len(line.messages))):
            self.inbox.put([(frontend.frontend_id, line.messages.popleft())])
        if not frontend.is_open:
            line.cut()

    def hurry_cancels(self, frontend: Frontend) -> None:
        """Those that wait overtake all else that waits."""
        line = frontend.link.line.messages
        cancels = [message for message in line if isinstance(message, Cancel)]
        others = [message for message in line if not isinstance(message, Cancel)]
        line.clear()
        line.extend([*cancels, *others])

    def round(self) -> None:
        """One round of the worker's loop; an exception is the engine's death."""
        if self.is_dead:
            return
        self.inbox.wake()
        try:
            self.worker._round()
        except RuntimeError as error:
            self.die(Died(InternalError(f"RuntimeError: {error}").to_data()))
        else:
            self.engine.audit()

    def deliver(self, frontend: Frontend, num_messages: int = 1 << 30) -> None:
        num_messages = min(num_messages, len(frontend.to_proxy))
        self.tell(frontend, [frontend.to_proxy.popleft() for _ in range(num_messages)])

    def tell(self, frontend: Frontend, messages: list[ToProxy]) -> None:
        if not messages:
            return
        if not frontend.link.dead.done():
            died = [message.error.message for message in messages if isinstance(message, Died)]
            frontend.last_words = frontend.last_words or "".join(died[:1])
        self.loop.do(frontend.proxy.on_messages, messages)
        frontend.heard_at_s = self.loop.time()

    def waiting_cancels(self) -> list[Cancel]:
        links = [frontend.link for frontend in self.all()]
        waiting = [
            message
            for link in links
            for message in (*link.line.messages, *(each.content for each in link.requests._backlog))
        ]
        return [message for message in waiting if isinstance(message, Cancel)]

    def drain_to_worker(self) -> None:
        """All that any frontend wants to say comes to the worker's inbox."""
        for frontend in self.all():
            requests, line = frontend.link.requests, frontend.link.line
            while line.messages or (len(requests) and not line.is_cut):
                self.loop.do(requests.flush)
                self.take(frontend, QUEUE_MAX)

    def die(self, last_words: Died) -> None:
        for frontend in self.frontends.values():
            if frontend.is_open:
                frontend.to_proxy.append(last_words)
        self.kill()

    def kill(self) -> None:
        """The process is gone; nobody has noticed."""
        self.is_dead = True
        for frontend in self.frontends.values():
            frontend.link.line.cut()

    def notice(self) -> None:
        """Each link's own way to see a death; the cause follows after the last words."""
        for frontend in self.frontends.values():
            self.loop.do(frontend.link.suspect)

    def pass_time(self, duration_s: float, *, is_heard: bool) -> None:
        """In slices, as a living loop would see it; the heart beats where it is heard. A loop
        that reads late is at work: idle, it would be one that is cut off."""
        while duration_s > 0:
            self.loop.pass_time(min(HEARTBEAT_S / 2, duration_s))
            duration_s -= HEARTBEAT_S / 2
            for frontend in self.all():
                if is_heard and frontend.is_open and not self.is_dead:
                    has_unread = bool(frontend.link.line.messages)
                    self.tell(frontend, [Heartbeat(0, is_busy=has_unread)])

    def end(self) -> None:
        self.loop.end()
