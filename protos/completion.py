"""A whole answer, the same for every API: the SDK's clients, the executor and `baton.LLM`."""

from __future__ import annotations

from typing import Any

import msgspec

from protos.messages import ContextPhaseParams, FinishReason, KvStats, StageTimes, Usage

TOKENS_SHOWN = 8


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. The first three are the asking side's own clock, from call to arrival.

    `mean_itl_ms` is the time from first to last token, divided by the tokens
    after the first; 0 where there is one token only. `context` and `generation`
    are the servers' stages.
    """

    ttft_ms: float
    mean_itl_ms: float
    total_ms: float
    context: StageTimes | None = None
    generation: StageTimes | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer. Written as JSON, fields after `seed` that say nothing are left out.

    `prompt_token_ids` are known where the prompt was tokenised on this side.
    `stop_string` or `stop_token_id` is what ended it, if one did. Logits are
    there where they were asked for; `context_phase_params` where the request
    was a context phase, for the generation phase that goes on from it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    kv: KvStats
    timing: Timing
    external_id: str
    seed: int
    stop_string: str = ""
    stop_token_id: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    context_phase_params: ContextPhaseParams | None = None
    context_logits: Any = None
    generation_logits: Any = None

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """For rich, and for `repr`: what says nothing is left out, long lists are cut."""
        shown = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value is None or (isinstance(value, str | tuple) and value == field.default):
                continue
            shown.append((field.name, _Cut(value) if isinstance(value, tuple) else value))
        return shown

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"


class _Cut:
    """A tuple as a reader wants it: a prompt may have a hundred thousand tokens."""

    def __init__(self, items: tuple[int, ...]) -> None:
        self._items = items

    def __repr__(self) -> str:
        if len(self._items) <= TOKENS_SHOWN:
            return repr(self._items)
        shown = ", ".join(map(repr, self._items[:TOKENS_SHOWN]))
        return f"({shown}, ... {len(self._items)} in all)"


def timing_of(
    *,
    started_s: float,
    first_token_s: float | None,
    last_token_s: float,
    num_tokens: int,
    context: StageTimes | None = None,
    generation: StageTimes | None = None,
) -> Timing:
    """From instants of one clock; an answer without a token takes its end for the first."""
    first_s = last_token_s if first_token_s is None else first_token_s
    num_gaps = num_tokens - 1
    return Timing(
        ttft_ms=1e3 * (first_s - started_s),
        mean_itl_ms=1e3 * (last_token_s - first_s) / num_gaps if num_gaps > 0 else 0.0,
        total_ms=1e3 * (last_token_s - started_s),
        context=context,
        generation=generation,
    )
