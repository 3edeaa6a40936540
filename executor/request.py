"""What a service or an `LLM` hands to the executor, and what the boundary makes of it.

    as asked ── exact_request ── check_request ── check_form ── complete_request ──> the engine

`exact_request` makes every field exactly what it is declared to be, `check_request`
judges what needs no model, `check_form` what the executor's form can carry,
`complete_request` sets what the caller left open. All refuse by field, value and
limit; nothing has been registered or sent by then.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from typing import Any

import msgspec
import numpy as np

from executor import exact
from executor.engine.local import LocalExtras, LogitsProcessor
from executor.engine.seam import EngineRequest
from protos.checks import check_limits, check_sampling, check_sendable, check_text, check_token_ids
from protos.checks import invalid as refusal
from protos.errors import UnsupportedError
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    ModelLimits,
    RequestType,
    SamplingParams,
)
from protos.tokens import pack_token_ids

TOKEN_ID_MAX = (1 << 31) - 1
EXTERNAL_ID_LENGTH_MAX = exact.TEXT_LENGTH_MAX
DEADLINE_S_MAX = 24 * 3600.0
FEW_IDS_MAX = 256
LOCAL_FORM = "single"
"""The form whose engine lives in the caller's process."""
LOCAL_FIELDS = ("return_context_logits", "return_generation_logits", "logits_processor")


class ExecutorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling.max_tokens` None: as many as there is room for; `sampling.seed` None: any.

    `max_tokens` counts the whole answer, with the tokens of it that exist already:
    the first ones that `context_phase_params` brings, or `output_prefix_token_ids`
    of an answer that was begun elsewhere. Those are not streamed again: chunks
    start behind them, and text and stop strings go on as if never interrupted.
    """

    external_id: str
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    disagg_request_id: DisaggRequestId | None = None
    context_phase_params: ContextPhaseParams | None = None
    output_prefix_token_ids: tuple[int, ...] = ()
    return_context_logits: bool = False
    return_generation_logits: bool = False
    logits_processor: LogitsProcessor | None = None
    """These three: in the single-process form alone."""
    multimodal: Any = None
    """Images and the like: no engine of ours takes them, so they are refused by name."""
    max_unread_tokens: int = 0
    """More unread tokens of a stream end its request with SlowConsumerError; 0: no limit
    but the answer's own length. A server sets its own (`max_unread_tokens` of its file)."""


def admit_request(request: ExecutorRequest, limits: ModelLimits, form: str) -> ExecutorRequest:
    """All four steps. Raises InvalidRequestError or UnsupportedError."""
    request = exact_request(request)
    check_request(request)
    check_form(request, form)
    return complete_request(request, limits, "this engine")


def exact_request(request: ExecutorRequest) -> ExecutorRequest:
    """The same, every field of exactly its type. Raises InvalidRequestError."""
    if not isinstance(request, ExecutorRequest):
        raise refusal("request", f"of type {type(request).__name__}", "an ExecutorRequest")
    disagg_id, params = request.disagg_request_id, request.context_phase_params
    processor = request.logits_processor
    if processor is not None and not callable(processor):
        raise refusal("logits_processor", f"of type {type(processor).__name__}", "a callable")
    return ExecutorRequest(
        external_id=exact.text("external_id", request.external_id, EXTERNAL_ID_LENGTH_MAX),
        request_type=exact.request_type("request_type", request.request_type),
        prompt_token_ids=exact.integers("token_ids", request.prompt_token_ids),
        sampling=exact.sampling_params(request.sampling),
        deadline_s=exact.number("deadline_s", request.deadline_s),
        disagg_request_id=None if disagg_id is None else exact.disagg_id(disagg_id),
        context_phase_params=None if params is None else exact.context_params(params),
        output_prefix_token_ids=exact.integers(
            "output_prefix_token_ids", request.output_prefix_token_ids
        ),
        return_context_logits=exact.truth("return_context_logits", request.return_context_logits),
        return_generation_logits=exact.truth(
            "return_generation_logits", request.return_generation_logits
        ),
        logits_processor=processor,
        multimodal=request.multimodal,
        max_unread_tokens=exact.integer("max_unread_tokens", request.max_unread_tokens),
    )


def check_request(request: ExecutorRequest) -> None:
    """What can be judged of an exact one without a model. Raises InvalidRequestError."""
    external_id, deadline_s = request.external_id, request.deadline_s
    check_text("external_id", external_id)
    if not 1 <= len(external_id) <= EXTERNAL_ID_LENGTH_MAX:
        limit = f"1 to {EXTERNAL_ID_LENGTH_MAX} characters"
        raise refusal("external_id", external_id, limit)
    if not (math.isfinite(deadline_s) and 0 < deadline_s <= DEADLINE_S_MAX):
        raise refusal("deadline_s", deadline_s, f"over 0, at most {DEADLINE_S_MAX:g}")
    if request.max_unread_tokens < 0:
        raise refusal("max_unread_tokens", request.max_unread_tokens, "at least 0")
    if not request.prompt_token_ids:
        raise refusal("prompt", "0 tokens", "at least one token")
    check_sendable(request.sampling)
    check_sampling(request.sampling)
    _check_ids(request.prompt_token_ids, "token_ids")
    _check_ids(request.output_prefix_token_ids, "output_prefix_token_ids")
    _check_hand_off(request)
    _check_combinations(request)


def check_form(request: ExecutorRequest, form: str) -> None:
    """What this form of the executor cannot carry. Raises UnsupportedError, by field."""
    if request.multimodal is not None:
        raise UnsupportedError(
            "multimodal is given, and no engine of Baton takes anything but text",
            field="multimodal",
            limit="absent",
        )
    if form == LOCAL_FORM:
        return
    for field in LOCAL_FIELDS:
        if getattr(request, field):
            raise UnsupportedError(
                f"{field} does not cross a process boundary: it works in the {LOCAL_FORM} form "
                f"of the executor alone, and this one's form is {form}",
                field=field,
                value=form,
                limit=LOCAL_FORM,
            )


def complete_request(
    request: ExecutorRequest, limits: ModelLimits, on: str = "this server"
) -> ExecutorRequest:
    """The same with `max_tokens` and `seed` set. `on` names the limits' owner.

    Raises InvalidRequestError where prompt and answer do not fit, in the numbers
    that the caller knows.
    """
    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    check_limits(num_prompt, sampling, limits, on)
    if max(request.prompt_token_ids) >= limits.vocab_size:
        check_token_ids(request.prompt_token_ids, "token_ids", limits)
    check_token_ids(request.output_prefix_token_ids, "output_prefix_token_ids", limits)
    check_token_ids(sampling.stop_token_ids, "sampling.stop_token_ids", limits)
    max_tokens = _max_tokens(request, limits)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    if (max_tokens, seed) == (sampling.max_tokens, sampling.seed):
        return request
    sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)
    return msgspec.structs.replace(request, sampling=sampling)


def to_engine_request(request: ExecutorRequest, client_id: int) -> EngineRequest:
    """Of a completed request."""
    processor = request.logits_processor
    return EngineRequest(
        request_id=client_id,
        request_type=request.request_type,
        prompt_token_ids=pack_token_ids(request.prompt_token_ids),
        sampling=request.sampling,
        deadline_s=request.deadline_s,
        disagg_request_id=request.disagg_request_id,
        context_phase_params=request.context_phase_params,
        output_prefix_token_ids=pack_token_ids(request.output_prefix_token_ids),
        return_context_logits=request.return_context_logits,
        return_generation_logits=request.return_generation_logits,
        local=None if processor is None else LocalExtras(logits_processor=processor),
    )


def num_begun(request: ExecutorRequest) -> int:
    """Tokens of the answer that exist already."""
    params = request.context_phase_params
    return len(request.output_prefix_token_ids if params is None else params.first_token_ids)


def _check_ids(token_ids: tuple[int, ...], field: str) -> None:
    if not token_ids:
        return
    low, high = _range(token_ids)
    bad = low if low < 0 else high
    if not 0 <= bad <= TOKEN_ID_MAX:
        raise refusal(field, bad, f"0 to {TOKEN_ID_MAX}")


def _range(token_ids: tuple[int, ...]) -> tuple[int, int]:
    """NumPy's one pass is the faster one where there are many."""
    if len(token_ids) > FEW_IDS_MAX:
        with contextlib.suppress(OverflowError):
            array = np.asarray(token_ids, dtype=np.int64)
            return int(array.min()), int(array.max())
    return min(token_ids), max(token_ids)


def _check_hand_off(request: ExecutorRequest) -> None:
    """What each type must bring along, and no other may."""
    kind, params = request.request_type, request.context_phase_params
    is_generation_only = kind is RequestType.GENERATION_ONLY
    if params is None and is_generation_only:
        raise refusal("context_phase_params", "absent", "given in a generation_only request")
    if params is not None:
        _check_ids(params.first_token_ids, "context_phase_params.first_token_ids")
    if params is not None and not is_generation_only:
        raise refusal("context_phase_params", "given", f"absent in a {kind} request")
    if request.disagg_request_id is None and kind is RequestType.CONTEXT_ONLY:
        raise refusal("disagg_request_id", "absent", "given in a context_only request")


def _check_combinations(request: ExecutorRequest) -> None:
    """Each part could be served, but not together."""
    kind, max_tokens = request.request_type, request.sampling.max_tokens
    is_whole = kind is RequestType.CONTEXT_AND_GENERATION
    if request.output_prefix_token_ids and not is_whole:
        value = f"{len(request.output_prefix_token_ids)} tokens"
        raise refusal("output_prefix_token_ids", value, f"absent in a {kind} request")
    if kind is RequestType.CONTEXT_ONLY and max_tokens not in (None, 1):
        raise refusal("sampling.max_tokens", max_tokens, "1 in a context_only request")
    if request.return_context_logits and kind is RequestType.GENERATION_ONLY:
        limit = "absent in a generation_only request: its prompt is computed elsewhere"
        raise refusal("return_context_logits", True, limit)
    if request.return_generation_logits and kind is RequestType.CONTEXT_ONLY:
        limit = "absent in a context_only request: the generation phase is elsewhere"
        raise refusal("return_generation_logits", True, limit)


def _max_tokens(request: ExecutorRequest, limits: ModelLimits) -> int:
    """As asked, or what `max_total_tokens` leaves: at least one token must be new."""
    num_prompt, begun = len(request.prompt_token_ids), num_begun(request)
    asked = request.sampling.max_tokens
    if asked is not None:
        if asked <= begun:
            limit = f"at least {begun + 1}: {begun} tokens of the answer exist already"
            raise refusal("sampling.max_tokens", asked, limit)
        return asked
    if request.request_type is RequestType.CONTEXT_ONLY:
        return 1
    room = limits.max_total_tokens - num_prompt
    if room <= begun:
        raise refusal(
            "prompt",
            f"{num_prompt} tokens, followed by {begun} of the answer",
            f"at most {limits.max_total_tokens - 1} tokens with them, so that one can follow",
        )
    return room
