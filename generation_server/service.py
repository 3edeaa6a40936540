"""The generation role: take over a prompt's KV and go on from its first token.

Nothing of a hand-off is used before its signature was verified and it was found
to fit this server: model, layout, transport and prompt, each refused by name.
"""

from __future__ import annotations

import msgspec

from common.hashing import prompt_digest
from executor.engine.seam import EngineIdentity
from executor.request import ExecutorRequest, complete_request
from protos.checks import check_token_ids, invalid
from protos.codec import decode_params
from protos.messages import ContextPhaseParams, GenerateRequest, KvLayout, RequestType
from protos.tokens import pack_token_ids
from serving.role import Admission, Ending, Outcome, Role, plain_finish, plain_request


class GenerationRole(Role):
    """Serves generation_only, and whole requests where a client asks for one."""

    name = "generation"
    request_types = (RequestType.GENERATION_ONLY, RequestType.CONTEXT_AND_GENERATION)

    def prepare(self, admission: Admission) -> ExecutorRequest:
        request = admission.request
        if request.request_type is not RequestType.GENERATION_ONLY:
            return super().prepare(admission)
        params = self._verified_params(request)
        check_fit(params, admission.identity)
        check_prompt(params, request, admission.prompt_token_ids)
        first = params.first_token_ids
        limits = admission.identity.model_info.limits
        check_token_ids(first, "context_phase_params.first_token_ids", limits)
        plain = plain_request(admission)
        handed_over = msgspec.structs.replace(
            plain,
            sampling=msgspec.structs.replace(plain.sampling, seed=params.seed),
            disagg_request_id=params.disagg_request_id,
            context_phase_params=params,
        )
        return complete_request(handed_over, limits)

    def _verified_params(self, request: GenerateRequest) -> ContextPhaseParams:
        signed = request.context_phase_params
        assert signed is not None, "the codec refuses a generation_only request without them"
        self.secret.verify_params(signed)
        return decode_params(signed.payload)

    def end(self, outcome: Outcome) -> Ending:
        """The context phase's times come with its parameters."""
        params = outcome.request.context_phase_params
        if params is None:
            return super().end(outcome)
        return Ending(
            finish=plain_finish(
                outcome, context_timing=params.timing, generation_timing=outcome.finish.timing
            )
        )


def check_fit(params: ContextPhaseParams, identity: EngineIdentity) -> None:
    """Whether this engine can take over that KV. Raises InvalidRequestError by field."""
    ours = identity.layout
    for name in KvLayout.__struct_fields__:
        theirs, limit = getattr(params.layout, name), getattr(ours, name)
        if theirs != limit:
            raise invalid(f"context_phase_params.layout.{name}", theirs, f"{limit}, as here")
    model = identity.model_info.limits.model
    if params.model != model:
        raise invalid("context_phase_params.model", params.model, f"{model}, as here")
    if params.transport != identity.transport:
        raise invalid(
            "context_phase_params.transport", params.transport, f"{identity.transport}, as here"
        )
    num_ranks = ours.tp_size * ours.pp_size
    if len(params.rank_addresses) != num_ranks:
        raise invalid(
            "context_phase_params.rank_addresses",
            f"{len(params.rank_addresses)} addresses",
            f"{num_ranks}, one for each rank",
        )


def check_prompt(
    params: ContextPhaseParams, request: GenerateRequest, prompt_token_ids: tuple[int, ...]
) -> None:
    """Whether the KV is that of this request's prompt. Raises InvalidRequestError by field."""
    if request.token_ids is None:
        raise invalid(
            "prompt",
            "text" if request.text is not None else "chat",
            "token_ids in a generation_only request",
        )
    num_tokens = len(prompt_token_ids)
    if params.num_prompt_tokens != num_tokens:
        raise invalid(
            "context_phase_params.num_prompt_tokens",
            params.num_prompt_tokens,
            f"{num_tokens}, the tokens of the prompt",
        )
    digest = prompt_digest(pack_token_ids(prompt_token_ids))
    if params.prompt_digest != digest:
        raise invalid(
            "context_phase_params.prompt_digest",
            params.prompt_digest.hex(),
            f"{digest.hex()}, the digest of the prompt",
        )
    given = request.disagg_request_id
    if given is not None and given != params.disagg_request_id:
        raise invalid(
            "disagg_request_id",
            str(given),
            f"{params.disagg_request_id}, the one of context_phase_params",
        )
    seed = request.sampling.seed
    if seed is not None and seed != params.seed:
        raise invalid("sampling.seed", seed, f"absent or {params.seed}, the context phase's")
