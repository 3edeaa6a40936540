"""The scripted engine's control: all books are real, no memory is.

Its KV events tell of the prompts' full blocks, since it reuses none: stored when
a request is admitted (its prompt is prefilled in that step), removed when the
last request or lease that holds such a block is gone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from executor.engine.control import RankFacts
from executor.engine.control_base import ControlBase, Gauges
from executor.engine.control_seam import KvSnapshot, LoraInfo
from executor.engine.kv_events import KvEventLog
from executor.engine.loras import LoraBook
from executor.engine.profiles import StepTracer

Chain = tuple[bytes, ...]
"""A root, then the hash of each full block of a prompt."""


class ScriptedBlocks:
    """How many holders each block hash has. Kept only while somebody listens."""

    def __init__(self, tokens_per_block: int, chains: Callable[[], Iterable[Chain]]) -> None:
        self.tokens_per_block = tokens_per_block
        self.log = KvEventLog()
        self._chains = chains
        self._num_holders: Counter[bytes] = Counter()

    def hold(self, make_chain: Callable[[], Chain]) -> None:
        """One more request holds this chain, which is made only where somebody listens."""
        if not self.log.is_listening:
            return
        chain = make_chain()
        for parent, block_hash in itertools.pairwise(chain):
            self._num_holders[block_hash] += 1
            if self._num_holders[block_hash] == 1:
                self.log.stored(block_hash, parent, self.tokens_per_block)

    def let_go(self, make_chain: Callable[[], Chain]) -> None:
        if not self.log.is_listening:
            return
        for block_hash in reversed(make_chain()[1:]):
            self._num_holders[block_hash] -= 1
            if not self._num_holders[block_hash]:
                del self._num_holders[block_hash]
                self.log.removed(block_hash)

    def listen(self, is_listening: bool) -> None:
        if is_listening and not self.log.is_listening:
            self._num_holders = self._counted()
            self.log.missed()
        self.log.listen(is_listening)

    def snapshot(self) -> KvSnapshot:
        counted = self._num_holders if self.log.is_listening else self._counted()
        return KvSnapshot(
            sequence=self.log.told(),
            block_hashes=tuple(counted),
            tokens_per_block=self.tokens_per_block,
        )

    def check(self) -> None:
        """Raises AssertionError where the counts are not those of the live chains."""
        assert not self.log.is_listening or self._num_holders == self._counted()

    def _counted(self) -> Counter[bytes]:
        return Counter(block_hash for chain in self._chains() for block_hash in chain[1:])


class ScriptedControl(ControlBase):
    """`holders` names what keeps the engine awake; `load` is what waking up takes."""

    def __init__(
        self,
        *,
        blocks: ScriptedBlocks,
        holders: Callable[[], list[str]],
        load: Callable[[], None],
        reset: Callable[[], None],
        gauges: Callable[[], Gauges],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(
            facts=RankFacts(rank=0, engine="scripted", device="none"),
            tracer=StepTracer("scripted"),
            log=blocks.log,
            gauges=gauges,
            clock=clock,
        )
        self._blocks = blocks
        self._holders = holders
        self._load = load
        self._reset = reset
        self._loras = LoraBook()

    def sleep(self) -> None:
        if self._is_asleep:
            return
        self.refuse_held(self._holders())
        self._log.cleared()
        self._is_asleep = True

    def wake_up(self) -> None:
        if self._is_asleep:
            self._load()
            self._is_asleep = False

    def load_lora(self, name: str, path: str) -> None:
        self._loras.load(name, path)

    def unload_lora(self, name: str) -> None:
        self._loras.unload(name)

    def list_loras(self) -> tuple[LoraInfo, ...]:
        return self._loras.loaded()

    def listen(self, *, stats: bool, kv_events: bool) -> None:
        self._blocks.listen(kv_events)
        super().listen(stats=stats, kv_events=kv_events)

    def kv_snapshot(self) -> KvSnapshot:
        return self._blocks.snapshot()

    def reset_counters(self) -> None:
        self._reset()
