"""The context role: prefill a prompt, sample its first token, leave the KV to be pulled."""

from __future__ import annotations

import secrets

import msgspec

from common.security import ClusterSecret
from executor.request import ExecutorRequest
from protos.codec import encode_params
from protos.errors import InternalError
from protos.messages import DisaggRequestId, FinishReason, RequestType
from serving.role import Admission, Ending, Outcome, Role, plain_finish

_COUNTER_END = 1 << 32


class DisaggIdMint:
    """Ids of hand-offs that no router started, under an epoch of this server's own."""

    def __init__(self) -> None:
        self._epoch = secrets.randbits(64)
        self._counter = 0

    def mint(self) -> DisaggRequestId:
        if self._counter == _COUNTER_END:
            self._epoch, self._counter = secrets.randbits(64), 0
        self._counter += 1
        return DisaggRequestId(self._epoch, self._counter - 1, 0)


class ContextRole(Role):
    """Serves context_only, and whole requests where a client asks for one."""

    name = "context"
    request_types = (RequestType.CONTEXT_ONLY, RequestType.CONTEXT_AND_GENERATION)

    def __init__(self, server_name: str, secret: ClusterSecret) -> None:
        super().__init__(server_name, secret)
        self._ids = DisaggIdMint()

    def prepare(self, admission: Admission) -> ExecutorRequest:
        """A context phase makes one token: the engine's ordinary path, with no special case."""
        request = admission.request
        if request.request_type is not RequestType.CONTEXT_ONLY:
            return super().prepare(admission)
        one_token = msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=1),
            disagg_request_id=request.disagg_request_id or self._ids.mint(),
        )
        return super().prepare(
            Admission(
                request=one_token,
                prompt_token_ids=admission.prompt_token_ids,
                deadline_s=admission.deadline_s,
                identity=admission.identity,
            )
        )

    def end(self, outcome: Outcome) -> Ending:
        """Sign the hand-off. A first token that ended the request has none."""
        if outcome.request.request_type is not RequestType.CONTEXT_ONLY:
            return super().end(outcome)
        finish = outcome.finish
        plain = plain_finish(outcome, context_timing=finish.timing, generation_timing=None)
        if finish.reason is not FinishReason.CONTEXT:
            return Ending(finish=plain)
        if finish.context_phase_params is None:
            raise InternalError("the engine finished a context phase without its parameters")
        params = msgspec.structs.replace(
            finish.context_phase_params,
            server_name=self.server_name,
            model=outcome.model,
            timing=finish.timing,
        )
        return Ending(
            finish=plain, context_phase_params=self.secret.sign_params(encode_params(params))
        )
