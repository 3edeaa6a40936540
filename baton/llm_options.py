"""The keyword arguments of an LLM's request, judged by the names they were given by."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from baton.calls import deadline_ms_of, sampling_of
from baton.prompts import token_ids_of
from executor.request import ExecutorRequest
from protos.checks import invalid
from protos.messages import SamplingParams

if TYPE_CHECKING:
    from executor.engine.local import LogitsProcessor

_FLAGS = ("return_context_logits", "return_generation_logits")
_OF_REQUEST = (
    "external_id",
    "timeout_s",
    "output_prefix_token_ids",
    *_FLAGS,
    "logits_processor",
    "multimodal",
    "max_unread_tokens",
)
_NUMBERS = ("temperature", "top_k", "top_p")


class Options(TypedDict, total=False):
    """Keyword arguments of every request. Sampling given here wins over `sampling`.

    `external_id` names the request in logs ("NAME-3" in a list); `timeout_s` is its
    deadline from when the engine takes it. The next four and `max_unread_tokens` are
    ExecutorRequest's (executor/request.py). `multimodal` is there to be refused by name.
    """

    external_id: str
    timeout_s: float
    output_prefix_token_ids: Sequence[int]
    return_context_logits: bool
    return_generation_logits: bool
    logits_processor: LogitsProcessor
    multimodal: Any
    max_unread_tokens: int
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


def request_of(
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams | None,
    options: Mapping[str, Any],
    *,
    mint_id: Callable[[], str],
    default_deadline_s: float,
) -> ExecutorRequest:
    """Raises InvalidRequestError for an option that does not exist or is no such thing."""
    given = {name: value for name, value in options.items() if name in _OF_REQUEST}
    sampled = {name: value for name, value in options.items() if name not in _OF_REQUEST}
    deadline_ms = deadline_ms_of(given.pop("timeout_s", None))
    external_id = given.pop("external_id", "")
    prefix = given.pop("output_prefix_token_ids", ())
    _check(given)
    return ExecutorRequest(
        external_id=mint_id() if external_id == "" else external_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_whole(sampling_of({**sampled, "sampling": sampling})),
        deadline_s=deadline_ms / 1000 or default_deadline_s,
        output_prefix_token_ids=token_ids_of(prefix, "output_prefix_token_ids"),
        **given,
    )


def _check(given: Mapping[str, Any]) -> None:
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise invalid(name, given[name], "true or false")
    processor = given.get("logits_processor")
    if processor is not None and not callable(processor):
        raise invalid("logits_processor", processor, "callable")
    if "max_unread_tokens" in given:
        try:
            operator.index(given["max_unread_tokens"])
        except TypeError:
            raise invalid("max_unread_tokens", given["max_unread_tokens"], "an integer") from None


def _whole(sampling: SamplingParams) -> SamplingParams:
    """Over the wire what is None is not sent; here nobody would put a default in its place."""
    for name in _NUMBERS:
        if getattr(sampling, name) is None:
            raise invalid(f"sampling.{name}", None, "a number")
    return sampling
