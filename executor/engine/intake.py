"""Turns a request into a sequence, or refuses it by field, value and limit."""

from __future__ import annotations

from common.hashing import block_hashes, prompt_digest, root_hash
from executor.engine.prefix import check_prefix
from executor.engine.seam import EngineIdentity, EngineRequest
from executor.engine.sequence import Sequence
from protos.checks import check_limits, check_token_ids
from protos.errors import InvalidRequestError
from protos.messages import ContextPhaseParams, KvLayout, RequestType
from protos.tokens import unpack_token_ids

LAYOUT_FIELDS = (
    "layout_version",
    "model_fingerprint",
    "dtype",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "tokens_per_block",
    "tp_size",
    "tp_rank",
    "pp_size",
    "pp_rank",
)


def make_sequence(request: EngineRequest, identity: EngineIdentity, now_s: float) -> Sequence:
    """Raises InvalidRequestError for what this engine can never serve."""
    limits = identity.model_info.limits
    prompt = unpack_token_ids(request.prompt_token_ids)
    check_limits(len(prompt), request.sampling, limits)
    check_token_ids(prompt, "token_ids", limits)
    max_tokens = request.sampling.max_tokens
    assert max_tokens is not None, "max_tokens is deduced before the engine"
    prefix = check_prefix(request, limits)
    first_tokens = _check_hand_off(request, identity, len(prompt), max_tokens) or prefix
    root = root_hash(identity.layout.model_fingerprint, request.cache_salt)
    # What the prefix cache may serve: a broken-off answer's own tokens too.
    known = request.prompt_token_ids + request.output_prefix_token_ids
    hashes = block_hashes(known, identity.layout.tokens_per_block, root)
    return Sequence(
        request=request,
        tokens=[*prompt, *first_tokens],
        num_prompt=len(prompt),
        max_tokens=max_tokens,
        hashes=list(hashes),
        root=root,
        arrived_s=now_s,
        deadline_s=now_s + request.deadline_s,
        num_streamed_before=len(first_tokens),
    )


def _check_hand_off(
    request: EngineRequest, identity: EngineIdentity, num_prompt: int, max_tokens: int
) -> tuple[int, ...]:
    """The first tokens that a generation_only request brings along."""
    if request.request_type is RequestType.CONTEXT_AND_GENERATION:
        return ()
    if request.disagg_request_id is None:
        raise _invalid("disagg_request_id", "absent", f"given in a {request.request_type} request")
    if request.request_type is RequestType.CONTEXT_ONLY:
        return ()
    params = request.context_phase_params
    if params is None:
        raise _invalid("context_phase_params", "absent", "given in a generation_only request")
    _check_layout(params.layout, identity.layout)
    _check_params(params, request, identity, num_prompt)
    num_first = len(params.first_token_ids)
    if not 1 <= num_first < max_tokens:
        raise _invalid(
            "context_phase_params.first_token_ids",
            f"{num_first} tokens",
            f"at least one, and fewer than max_tokens ({max_tokens})",
        )
    check_token_ids(
        params.first_token_ids,
        "context_phase_params.first_token_ids",
        identity.model_info.limits,
    )
    return params.first_token_ids


def _check_layout(theirs: KvLayout, ours: KvLayout) -> None:
    for name in LAYOUT_FIELDS:
        given, wanted = getattr(theirs, name), getattr(ours, name)
        if given != wanted:
            raise _invalid(
                f"context_phase_params.layout.{name}", given, f"{wanted!r}, as on this server"
            )


def _check_params(
    params: ContextPhaseParams, request: EngineRequest, identity: EngineIdentity, num_prompt: int
) -> None:
    expected = {
        "disagg_request_id": (params.disagg_request_id, request.disagg_request_id),
        "transport": (params.transport, identity.transport),
        "num_prompt_tokens": (params.num_prompt_tokens, num_prompt),
        "prompt_digest": (params.prompt_digest, prompt_digest(request.prompt_token_ids)),
        "rank_addresses": (len(params.rank_addresses), params.layout.tp_size),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise _invalid(f"context_phase_params.{name}", given, str(wanted))
    if params.incarnation == identity.incarnation:
        raise _invalid(
            "context_phase_params.incarnation", params.incarnation, "that of another server"
        )


def _invalid(field: str, value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value}; it must be {limit}", field=field, value=value, limit=limit
    )
