"""A caller's own logits processors, and what becomes of one that fails.

They run in the engine's loop on the CPU, one row at a time; a failure is its
request's alone.
"""

from __future__ import annotations

import numpy as np
import torch

from executor.engine.local import Logits, LogitsProcessor
from executor.engine.sequence import Sequence
from protos.errors import RequestFailedError, describe

FIELD = "logits_processor"


def apply_processors(
    sequences: list[Sequence], logits_bv: torch.Tensor
) -> list[RequestFailedError | None]:
    """Changes the rows of those that have one; an error where it failed."""
    return [
        _apply(sequence, logits_bv[index]) if sequence.request.local is not None else None
        for index, sequence in enumerate(sequences)
    ]


def _apply(sequence: Sequence, logits_v: torch.Tensor) -> RequestFailedError | None:
    assert sequence.request.local is not None
    processor = sequence.request.local.logits_processor
    if processor is None:
        return None
    try:
        changed = _called(processor, sequence, logits_v)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: this thread is not the caller's to end
        return RequestFailedError(f"the logits processor failed: {describe(error)}", field=FIELD)
    logits_v.copy_(torch.from_numpy(changed))
    return None


def _called(processor: LogitsProcessor, sequence: Sequence, logits_v: torch.Tensor) -> Logits:
    """Raises what it raises, and TypeError, ValueError for what cannot be logits."""
    given = logits_v.cpu().numpy().copy()
    changed = np.asarray(processor(tuple(sequence.tokens), given), dtype=np.float32)
    if changed.shape != given.shape:
        raise ValueError(f"it returned the shape {changed.shape}, not {given.shape}")
    return np.ascontiguousarray(changed)
