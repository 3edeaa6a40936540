"""What the engine's core needs of whoever computes: TorchRunner, or a test's double."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from executor.engine.local import Logits
from executor.engine.scheduler import Chunk
from protos.errors import BatonError


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What came of one chunk. `token_id` is None where it samples none, and beside an error."""

    token_id: int | None = None
    error: BatonError | None = None
    """Ends this sequence alone: its logits are not finite, or its processor failed."""
    context_logits: Logits | None = None
    """[prompt tokens of this chunk, vocabulary], where the request wants them."""
    generation_logits: Logits | None = None
    """[1, vocabulary]: what the token was chosen from, where the request wants it."""


class Runner(Protocol):
    """Computes chunks. Its tokens depend on each chunk's own sequence alone."""

    @property
    def progress(self) -> int:
        """Grows while `run` and `restore` get on. Read from another thread."""

    def run(self, chunks: list[Chunk]) -> list[ChunkResult]: ...

    def check_release(self) -> None:
        """Raises UnsupportedError where its memory cannot be given back and had again."""

    def release(self) -> None:
        """Give the pool's memory and the weights back. What the pool held is lost."""

    def restore(self) -> None:
        """Have the weights again. Raises ConfigError, RequestFailedError of severity REQUEST;
        nothing has changed then.
        """
