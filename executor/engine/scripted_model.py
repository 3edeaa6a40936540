"""What the scripted engine says instead of a model: tokens, identity, and its refusals.

Pure functions of the configuration and the request.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from common.hashing import prompt_digest
from executor.config import EngineConfig, ScriptedConfig
from executor.engine.prefix import check_prefix
from executor.engine.seam import EngineIdentity, EngineOutput, EngineRequest
from protos.checks import check_limits, check_token_ids
from protos.errors import InvalidRequestError, RequestFailedError, UnsupportedError
from protos.messages import KvLayout, ModelInfo, ModelLimits, RequestType

ADDRESS = b"scripted"
TRANSPORT = "scripted"
ARCHITECTURE = "scripted"
"""What a model of ours says that has none, and so no text."""


def scripted_token(digest: bytes, seed: int, position: int, vocab_size: int) -> int:
    """The token at `position` of the completion of the prompt with this digest."""
    key = digest + seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % vocab_size


def scripted_completion(
    packed_prompt: bytes, seed: int, num_tokens: int, script: ScriptedConfig
) -> tuple[int, ...]:
    """What the engine must stream for this prompt when nothing ends it early."""
    digest = prompt_digest(packed_prompt)
    return tuple(scripted_token(digest, seed, i, script.vocab_size) for i in range(num_tokens))


def stamp(outputs: list[EngineOutput], now_s: float, vocab_size: int) -> None:
    """Put the time in place of their tokens; they are this step's own until it returns."""
    token_ids = (int(now_s * 1e6) % vocab_size,)
    for output in outputs:
        if output.token_ids:
            msgspec.structs.force_setattr(output, "token_ids", token_ids)


def scripted_identity(config: EngineConfig) -> EngineIdentity:
    script, cache = config.scripted, config.kv_cache
    room = min(script.max_total_tokens, cache.num_blocks * cache.tokens_per_block)
    max_total = min(config.max_total_tokens or room, room)
    limits = ModelLimits(
        model=config.served_model_name or "scripted",
        vocab_size=script.vocab_size,
        max_prompt_tokens=min(config.max_prompt_tokens or max_total - 1, max_total - 1),
        max_total_tokens=max_total,
        eos_token_ids=script.eos_token_ids,
    )
    return EngineIdentity(
        incarnation=secrets.randbits(63),
        model_info=ModelInfo(
            limits=limits, dtype=config.dtype, num_parameters=0, architecture=ARCHITECTURE
        ),
        layout=KvLayout(
            dtype=config.dtype,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            tokens_per_block=cache.tokens_per_block,
            model_fingerprint=f"scripted-{script.vocab_size}",
        ),
        transport=TRANSPORT,
        rank_addresses=(ADDRESS,),
        wires=TRANSPORT,
        num_blocks=cache.num_blocks,
    )


def check_scripted(
    request: EngineRequest,
    prompt: tuple[int, ...],
    identity: EngineIdentity,
    script: ScriptedConfig,
) -> None:
    """What can be judged from the request alone. Raises RequestError."""
    limits = identity.model_info.limits
    check_limits(len(prompt), request.sampling, limits)
    check_token_ids(prompt, "token_ids", limits)
    check_prefix(request, limits)
    _check_no_logits(request)
    if prompt[-1] == script.refuse_token_id:
        raise RequestFailedError("scripted: this request is refused", field="token_ids")
    if request.request_type is RequestType.GENERATION_ONLY:
        _check_params(request, len(prompt), identity.layout)


def _check_no_logits(request: EngineRequest) -> None:
    extras = request.local
    asked = {
        "return_context_logits": request.return_context_logits,
        "return_generation_logits": request.return_generation_logits,
        "logits_processor": extras is not None and extras.logits_processor is not None,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(
                f"{field}: the scripted engine has no logits; the torch engine has", field=field
            )


def _check_params(request: EngineRequest, num_tokens: int, layout: KvLayout) -> None:
    params = request.context_phase_params
    if params is None:
        raise invalid("context_phase_params", "absent", "given in a generation_only request")
    expected: dict[str, tuple[object, object]] = {
        "transport": (params.transport, TRANSPORT),
        "layout.model_fingerprint": (params.layout.model_fingerprint, layout.model_fingerprint),
        "num_prompt_tokens": (params.num_prompt_tokens, num_tokens),
        "prompt_digest": (params.prompt_digest, prompt_digest(request.prompt_token_ids)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise invalid(f"context_phase_params.{name}", given, repr(wanted))
    num_first = len(params.first_token_ids)
    if not 1 <= num_first < (request.sampling.max_tokens or 0):
        raise invalid(
            "context_phase_params.first_token_ids",
            f"{num_first} tokens",
            "at least 1, and fewer than max_tokens",
        )


def invalid(field: str, value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is {value!r}; it must be {limit}", field=field, value=value, limit=limit
    )
