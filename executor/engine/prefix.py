"""Tokens of an answer that exist already when its request comes: how both engines read them."""

from __future__ import annotations

from executor.engine.seam import EngineRequest
from protos.checks import check_token_ids, invalid
from protos.errors import UnsupportedError
from protos.messages import ModelLimits, RequestType
from protos.tokens import TOKEN_BYTES, unpack_token_ids

FIELD = "output_prefix_token_ids"


def check_prefix(request: EngineRequest, limits: ModelLimits) -> tuple[int, ...]:
    """The prefix's tokens. Raises InvalidRequestError, UnsupportedError."""
    packed, max_tokens = request.output_prefix_token_ids, request.sampling.max_tokens
    if not packed:
        return ()
    if request.request_type is not RequestType.CONTEXT_AND_GENERATION:
        raise UnsupportedError(
            f"{FIELD} is not taken in a {request.request_type} request, only in a "
            f"{RequestType.CONTEXT_AND_GENERATION} one",
            field=FIELD,
            limit=RequestType.CONTEXT_AND_GENERATION,
        )
    if len(packed) % TOKEN_BYTES:
        raise invalid(FIELD, f"{len(packed)} bytes", f"a multiple of {TOKEN_BYTES} bytes")
    tokens = unpack_token_ids(packed)
    check_token_ids(tokens, FIELD, limits)
    if max_tokens is not None and len(tokens) >= max_tokens:
        raise invalid(FIELD, f"{len(tokens)} tokens", f"fewer than max_tokens ({max_tokens})")
    return tokens
