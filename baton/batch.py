"""Many requests of one call: opened in order, looked at as they end, answered in order."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executor.result import GenerationResult
from protos.checks import invalid
from protos.completion import Completion
from protos.errors import BatonError, InvalidRequestError, ServerUnavailableError, Severity
from protos.messages import SamplingParams

LOOK_S = 1.0
"""How often we look whether the engine's thread is still there."""


class Batch:
    """Many requests of one call: opened in order, looked at as they end."""

    def __init__(
        self,
        num_all: int,
        *,
        return_exceptions: bool,
        is_alive: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._return_exceptions = return_exceptions
        self._is_alive = is_alive
        self._progress = progress
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open: dict[int, GenerationResult] = {}
        self._outcomes: list[Completion | BatonError | None] = [None] * num_all
        self._num_done = 0

    def run(
        self, open_one: Callable[[int, Callable[[], None]], GenerationResult]
    ) -> list[Completion | BatonError | None]:
        try:
            for index in range(len(self._outcomes)):
                try:
                    self._open[index] = open_one(index, functools.partial(self._ended.put, index))
                except BatonError as error:
                    self._settle(index, error)
                while not self._ended.empty():
                    self._take_one()
            while self._open:
                self._take_one()
        finally:
            for result in self._open.values():  # only where we were interrupted
                result.abort()
        return self._outcomes

    def _take_one(self) -> None:
        try:
            index = self._ended.get(timeout=LOOK_S)
        except queue.Empty:
            if not self._is_alive() and self._ended.empty():
                raise ServerUnavailableError("the LLM's thread has ended") from None
            return
        result = self._open.pop(index)
        error = result.error
        self._settle(index, result.result() if error is None else error)

    def _settle(self, index: int, outcome: Completion | BatonError) -> None:
        if isinstance(outcome, BatonError) and not self._return_exceptions:
            if len(self._outcomes) > 1 and outcome.severity is Severity.REQUEST:
                outcome.add_note(f"prompts[{index}] of {len(self._outcomes)} prompts")
            raise outcome
        self._outcomes[index] = outcome
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, len(self._outcomes))


def one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if not isinstance(sampling, list | tuple):
        raise invalid("sampling", sampling, "SamplingParams, or a list of them")
    if len(sampling) != num_prompts:
        raise InvalidRequestError(
            f"sampling has {len(sampling)} entries; it must be one for all or "
            f"{num_prompts}, one for each prompt",
            field="sampling",
            value=len(sampling),
            limit=num_prompts,
        )
    return sampling


def named(options: Mapping[str, Any], index: int, is_single: bool) -> Mapping[str, Any]:
    external_id = options.get("external_id")
    if is_single or not external_id or not isinstance(external_id, str):
        return options
    return {**options, "external_id": f"{external_id}-{index}"}
