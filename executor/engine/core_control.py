"""The control of the engine proper: what sleeps and wakes is the runner's memory."""

from __future__ import annotations

from collections.abc import Callable

from executor.engine.control import RankFacts
from executor.engine.control_base import ControlBase, Gauges
from executor.engine.control_seam import KvSnapshot, LoraInfo
from executor.engine.handoff import KvMover
from executor.engine.profiles import Tracer
from executor.engine.runner_seam import Runner
from executor.engine.scheduler import Scheduler
from protos.errors import InternalError, Severity, UnsupportedError, describe


class CoreControl(ControlBase):
    """`reset` sets the core's event counters to zero."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        mover: KvMover,
        facts: RankFacts,
        tracer: Tracer,
        reset: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(
            facts=facts, tracer=tracer, log=scheduler.blocks.log, gauges=self._count, clock=clock
        )
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._runner = runner
        self._mover = mover
        self._reset = reset

    def sleep(self) -> None:
        """Nobody may believe in the pool's content when its memory goes: the index goes first."""
        if self._is_asleep:
            return
        self.refuse_held(self._holders())
        self._runner.check_release()
        try:
            self._blocks.forget_cached()
            self._runner.release()
        except Exception as error:  # half of it is gone: neither awake nor asleep
            raise InternalError(
                f"falling asleep failed half-way: {describe(error)}",
                severity=Severity.ENGINE,
            ) from error
        self._is_asleep = True

    def wake_up(self) -> None:
        if self._is_asleep:
            self._runner.restore()
            self._is_asleep = False

    def load_lora(self, name: str, path: str) -> None:
        raise _no_lora(f"load {name!r} from {path!r}", name)

    def unload_lora(self, name: str) -> None:
        raise _no_lora(f"unload {name!r}", name)

    def list_loras(self) -> tuple[LoraInfo, ...]:
        return ()

    def kv_snapshot(self) -> KvSnapshot:
        return self._blocks.snapshot()

    def reset_counters(self) -> None:
        self._reset()

    def _holders(self) -> list[str]:
        """Requests in any state, holders of blocks, and what the data plane has under way."""
        names = dict.fromkeys(sequence.holder for sequence in self._scheduler.sequences())
        names |= dict.fromkeys(self._blocks.holder_names())
        audit = self._mover.audit()
        counts = {
            "leases": audit.leases,
            "transfers": audit.transfers,
            "pulls": audit.pulls,
            "operations": audit.operations,
        }
        return [*names, *(f"{count} {what}" for what, count in counts.items() if count)]

    def _count(self) -> Gauges:
        return Gauges(
            num_queued=self._scheduler.num_queued,
            num_running=self._scheduler.num_running,
            blocks_free=self._blocks.num_free,
            blocks_total=self._blocks.num_blocks,
        )


def _no_lora(wish: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot {wish}: the torch engine does not serve LoRA adapters", field="name", value=name
    )
