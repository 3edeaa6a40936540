"""What a role decides about a request; the rest of a server is the same for both.

`Role` serves context_and_generation, which any server can do alone. The
context and generation servers add their half of a hand-off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from common.security import ClusterSecret
from executor.engine.seam import EngineFinish, EngineIdentity
from executor.request import ExecutorRequest, complete_request
from protos.errors import InvalidRequestError
from protos.messages import (
    Finish,
    GenerateRequest,
    RequestType,
    SignedContextPhaseParams,
    StageTimes,
)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """A request that passed every check that no role decides; its external_id is set."""

    request: GenerateRequest
    prompt_token_ids: tuple[int, ...]
    deadline_s: float
    identity: EngineIdentity


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an executor's request finished."""

    request: ExecutorRequest
    model: str
    finish: EngineFinish
    stop_string: str


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a stream's last message says."""

    finish: Finish
    context_phase_params: SignedContextPhaseParams | None = None


class Role:
    """Base of both roles: a whole request on one server."""

    name: ClassVar[str]
    request_types: ClassVar[tuple[RequestType, ...]] = (RequestType.CONTEXT_AND_GENERATION,)

    def __init__(self, server_name: str, secret: ClusterSecret) -> None:
        self.server_name = server_name
        self.secret = secret

    def check_type(self, request_type: RequestType) -> None:
        """Raises InvalidRequestError for a type that this role does not serve."""
        if request_type not in self.request_types:
            limit = " or ".join(self.request_types)
            raise InvalidRequestError(
                f"request_type is {request_type}; it must be {limit} on a {self.name} server",
                field="request_type",
                value=str(request_type),
                limit=limit,
            )

    def prepare(self, admission: Admission) -> ExecutorRequest:
        """The executor's request; prompt and limits were checked. Raises InvalidRequestError.

        Completed here already: the stream's first message tells the seed.
        """
        request = plain_request(admission)
        return complete_request(request, admission.identity.model_info.limits)

    def end(self, outcome: Outcome) -> Ending:
        """What the client is told at the end."""
        timing = outcome.finish.timing
        context_timing = StageTimes(
            scheduled_ms=timing.scheduled_ms,
            first_token_ms=timing.first_token_ms,
            finished_ms=timing.first_token_ms,
        )
        return Ending(
            finish=plain_finish(outcome, context_timing=context_timing, generation_timing=timing)
        )


def plain_request(admission: Admission) -> ExecutorRequest:
    request = admission.request
    return ExecutorRequest(
        external_id=request.external_id,
        request_type=request.request_type,
        prompt_token_ids=admission.prompt_token_ids,
        sampling=request.sampling,
        deadline_s=admission.deadline_s,
        disagg_request_id=request.disagg_request_id,
    )


def plain_finish(
    outcome: Outcome,
    *,
    context_timing: StageTimes | None,
    generation_timing: StageTimes | None,
) -> Finish:
    finish = outcome.finish
    return Finish(
        reason=finish.reason,
        stop_string=outcome.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=finish.usage,
        kv=finish.kv,
        context_timing=context_timing,
        generation_timing=generation_timing,
    )
