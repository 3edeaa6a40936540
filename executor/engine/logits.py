"""Logits on their way to a caller: counted in bytes, and bounded before they exist.

A prompt's logits are [prompt tokens, vocabulary] in float32, gigabytes for a
long one. They are promised at submit, gathered chunk by chunk, and handed out
once, with the first token. What is promised to all live requests together is
bounded; a request that could never have its logits is refused as invalid.
"""

from __future__ import annotations

import numpy as np

from executor.engine.local import LocalOutput, Logits
from executor.engine.runner_seam import ChunkResult
from executor.engine.seam import EngineRequest
from executor.engine.sequence import Sequence
from protos.checks import invalid
from protos.errors import OverloadedError
from protos.messages import RequestType

CONTEXT_LOGITS_BYTES_MAX = 2 << 30
"""For all live requests together."""
FIELD = "return_context_logits"


class LogitsDesk:
    """Between the runner and the outputs, for those that asked."""

    def __init__(self, vocab_size: int, bytes_max: int = CONTEXT_LOGITS_BYTES_MAX) -> None:
        self._vocab_size = vocab_size
        self._bytes_max = bytes_max
        self._promised: dict[int, int] = {}
        self._gathered: dict[int, Logits] = {}
        self.num_bytes = 0
        """Handed out so far."""

    def check(self, request: EngineRequest, num_prompt: int) -> int:
        """The bytes that would be promised. Raises InvalidRequestError, OverloadedError."""
        if not request.return_context_logits:
            return 0
        if request.request_type is RequestType.GENERATION_ONLY:
            raise invalid(FIELD, "set", "left out of a generation_only request: it has no prefill")
        num_bytes = num_prompt * self._vocab_size * np.dtype(np.float32).itemsize
        if num_bytes > self._bytes_max:
            raise invalid(
                FIELD,
                f"{num_bytes} bytes for {num_prompt} tokens",
                f"at most {self._bytes_max} bytes",
            )
        num_promised = sum(self._promised.values())
        if num_promised + num_bytes > self._bytes_max:
            raise OverloadedError(
                f"{num_promised} bytes of context logits are promised to other requests; "
                f"{num_bytes} more would be over {self._bytes_max}",
                field=FIELD,
                value=num_bytes,
                limit=self._bytes_max,
            )
        return num_bytes

    def promise(self, request_id: int, num_bytes: int) -> None:
        if num_bytes:
            self._promised[request_id] = num_bytes

    def take(self, sequence: Sequence, start: int, result: ChunkResult) -> LocalOutput | None:
        """Keep what belongs to a later output; what goes with this chunk's token."""
        if result.context_logits is not None:
            self._gather(sequence, start, result.context_logits)
        if result.token_id is None:
            return None
        context = self._gathered.pop(sequence.request_id, None)
        generation = result.generation_logits
        if context is None and generation is None:
            return None
        for logits in (context, generation):
            self.num_bytes += 0 if logits is None else logits.nbytes
        return LocalOutput(context_logits=context, generation_logits=generation)

    def forget(self, request_id: int) -> None:
        self._promised.pop(request_id, None)
        self._gathered.pop(request_id, None)

    def _gather(self, sequence: Sequence, start: int, rows: Logits) -> None:
        whole = self._gathered.get(sequence.request_id)
        if whole is None:
            whole = np.empty((sequence.num_prompt, self._vocab_size), dtype=np.float32)
            self._gathered[sequence.request_id] = whole
        whole[start : start + len(rows)] = rows
