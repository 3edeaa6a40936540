"""What goes along with a request or an output within one process and never leaves it.

A Python callable cannot be sent, and logits are too large to be: a request's
`LocalExtras` and an output's `LocalOutput` are plain objects that no encoder of
ours knows. One that comes to a socket all the same is a TypeError there, not a
silent loss; `check_crosses` says so to the caller beforehand, by field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from protos.errors import UnsupportedError

if TYPE_CHECKING:
    from executor.engine.seam import EngineRequest

Logits: TypeAlias = npt.NDArray[np.float32]
LogitsProcessor: TypeAlias = Callable[[Sequence[int], Logits], Logits]
"""Called before each token is chosen with all tokens so far, prompt included, and the
model's logits [vocabulary]. It returns the logits to choose from, which may be the given
array, changed. It runs in the engine's loop: everybody waits for it. What it raises, or a
wrong shape, ends its own request with RequestFailedError."""


class LocalExtras:
    """Of a request."""

    __slots__ = ("logits_processor",)

    def __init__(self, *, logits_processor: LogitsProcessor | None = None) -> None:
        self.logits_processor = logits_processor


class LocalOutput:
    """Of an output: float32, the model's own, before any processor or temperature.

    `context_logits` [prompt tokens, vocabulary] come once, with the first token;
    row i is what the model says after token i of the prompt. `generation_logits`
    [tokens of this output, vocabulary] are those that its tokens were chosen from.
    """

    __slots__ = ("context_logits", "generation_logits")

    def __init__(
        self, *, context_logits: Logits | None = None, generation_logits: Logits | None = None
    ) -> None:
        self.context_logits = context_logits
        self.generation_logits = generation_logits


def check_crosses(request: EngineRequest) -> None:
    """Raises UnsupportedError, by field, for what works in the single-process form alone."""
    has_processor = request.local is not None and request.local.logits_processor is not None
    asked = {
        "return_context_logits": request.return_context_logits,
        "return_generation_logits": request.return_generation_logits,
        "logits_processor": has_processor,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(
                f"{field} works in the single-process form alone; "
                "here the engine is in another process",
                field=field,
                limit="the single-process form",
            )
