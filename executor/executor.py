"""The boundary that turns an engine into a service.

`GenerationExecutor.create` picks the form and says so, and why, in one log line
(executor/forms.py has the choice). Everything here belongs to the event loop that
created it, but `pre_shutdown`, which any thread may call, and the results that
`submit` hands out, which any thread and any loop may read.

Life: created (the model is loaded), serving, closing (`pre_shutdown`: no new
request, open ones fail), closed (`shutdown`). A worker that falls silent or
stalls costs the open requests, and new ones are refused until it is back. Or
dead: the first cause is kept and every later use raises it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from executor.config import EngineConfig
from executor.engine.control import PROFILE_S
from executor.engine.control_seam import IterationStats, KvEvent, KvSnapshot, LoraInfo
from executor.engine.seam import EngineIdentity
from executor.limits import ExecutorLimits
from executor.request import ExecutorRequest
from executor.result import GenerationResult, ResultChunk
from executor.subscriptions import Subscription
from protos.errors import EngineDeadError
from protos.messages import DisaggRequestId, LedgerAudit, Load

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer
    from executor.attach.point import AttachPoint
    from executor.post.spec import TokenizerSpec

__all__ = ["ExecutorRequest", "GenerationExecutor", "GenerationResult", "ResultChunk"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceFile:
    """A profile that one rank has written, on its own host."""

    path: str
    num_steps: int
    num_bytes: int
    recorded_s: float = 0.0
    is_full: bool = False
    """A trace takes memory, so it ended by itself: later steps are not in it."""


class GenerationExecutor(ABC):
    """See the module's docstring."""

    @staticmethod
    async def create(
        config: EngineConfig,
        *,
        name: str,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[str], None] | None = None,
        limits: ExecutorLimits | None = None,
        tokenizer_spec: TokenizerSpec | None = None,
        point: AttachPoint | None = None,
    ) -> GenerationExecutor:
        """Start the engine and wait until it is ready.

        `progress` hears about the stages in words. `tokenizer_spec` names, for postprocess
        workers, what `tokenizer` is where it is not the model's own; `point` is where a world of
        another process is attached to. Raises ConfigError for a configuration or model that
        cannot work, EngineDeadError with the worker's real error for anything else. Nothing is
        left behind then. Raises InvalidRequestError in an outer MPI job's process of another
        rank than 0.
        """
        from executor.forms import choose_form
        from executor.post.start import post_maker
        from executor.preflight import check_open_files
        from executor.proxy import Proxy
        from executor.world.outer import refuse_other_ranks

        check_open_files()
        if point is None:
            refuse_other_ranks()
        bounds = limits or ExecutorLimits.of(config)
        choice = choose_form(config, point)
        make_post = post_maker(config, name, bounds, tokenizer, tokenizer_spec)
        logger.info("executor of %s: %s, because %s", name, choice.what, choice.why)
        make_link = await choice.link_maker(
            config, name=name, limits=bounds, progress=progress or _ignore
        )
        proxy = Proxy(
            make_link,
            tokenizer=tokenizer,
            limits=bounds,
            make_post=make_post,
        )
        await proxy.start(progress or _ignore)
        return proxy

    @property
    @abstractmethod
    def form(self) -> str:
        """The form that was chosen."""

    @property
    @abstractmethod
    def identity(self) -> EngineIdentity: ...

    @property
    @abstractmethod
    def worker_pids(self) -> tuple[int, ...]: ...

    @abstractmethod
    def submit(self, request: ExecutorRequest) -> GenerationResult:
        """Raises RequestError where it cannot be taken, EngineDeadError after a death.

        What only the engine can judge comes through the result.
        """

    @abstractmethod
    def abort_request(self, client_id: int) -> None:
        """Unknown and ended ids are counted and ignored."""

    @abstractmethod
    def find(self, external_id: str) -> int | None:
        """The live client id of an external id."""

    @abstractmethod
    async def abort_named(self, external_id: str) -> bool:
        """Abort a request of that external id, whichever frontend of this engine has it.
        False where none is live."""

    @abstractmethod
    async def release(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        """End a lease. True where one was live."""

    @abstractmethod
    async def renew(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        """Start a lease's duration anew. True where one was live."""

    @abstractmethod
    async def load(self) -> Load: ...

    @abstractmethod
    async def audit(self) -> LedgerAudit:
        """Entries of this boundary, blocks of the engine, counters of all."""

    # --- control --------------------------------------------------------------

    @abstractmethod
    async def collective_rpc(self, method: str, **arguments: Any) -> tuple[Any, ...]:
        """Call a method of the engine's control on every rank (executor/engine/control.py has
        them), in order with the requests. Arguments and values are plain data, one value a rank.

        Raises RequestError where a rank refuses or fails; the engine goes on.
        """

    @property
    @abstractmethod
    def is_asleep(self) -> bool:
        """As of the last heartbeat, or of our own last call."""

    @abstractmethod
    def subscribe_stats(self) -> Subscription[IterationStats]:
        """One item a step from now on. Close it when nobody reads any more."""

    @abstractmethod
    def subscribe_kv_events(self) -> Subscription[KvEvent]:
        """From now on; `kv_snapshot` tells what was stored before."""

    @abstractmethod
    async def kv_snapshot(self) -> KvSnapshot: ...

    async def sleep(self) -> None:
        """Give the KV pool's memory and the weights back. Raises NotNowError, naming who
        holds on, while requests, leases or transfers are live."""
        await self.collective_rpc("sleep")

    async def wake_up(self) -> None:
        await self.collective_rpc("wake_up")

    async def start_profile(self, path: str, max_s: float = PROFILE_S) -> None:
        """Every rank records its steps for a trace file at this absolute path of its host, for
        `max_s` at most: then it is written, whether or not anybody stops it."""
        await self.collective_rpc("start_profile", path=path, max_s=max_s)

    async def stop_profile(self) -> tuple[TraceFile, ...]:
        """Returns once the files are written, one a rank. Raises NotNowError where no profile
        is under way and none has ended by itself."""
        values = await self.collective_rpc("stop_profile")
        return tuple(
            TraceFile(
                path=value["path"],
                num_steps=value["steps"],
                num_bytes=value["bytes"],
                recorded_s=value["recorded_s"],
                is_full=value["is_full"],
            )
            for value in values
        )

    async def load_lora(self, name: str, path: str) -> None:
        await self.collective_rpc("load_lora", name=name, path=path)

    async def unload_lora(self, name: str) -> None:
        await self.collective_rpc("unload_lora", name=name)

    async def list_loras(self) -> tuple[LoraInfo, ...]:
        first, *_ = await self.collective_rpc("list_loras")
        return tuple(msgspec.convert(item, LoraInfo) for item in first)

    # --- its fate -------------------------------------------------------------

    @abstractmethod
    def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead, and its base
        ServerUnavailableError while the worker is silent or stalled: it may recover."""

    @abstractmethod
    async def wait_dead(self) -> EngineDeadError:
        """Returns when the engine is gone, with the cause; also after `shutdown`."""

    @abstractmethod
    def pre_shutdown(self) -> None:
        """From any thread, never blocking: refuse new requests and end open ones."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop the worker, bounded, and free everything. Safe twice and after a death."""


def _ignore(_: str) -> None:
    pass
