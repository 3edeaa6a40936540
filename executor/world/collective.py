"""What crosses the leader's socket between rank 0 and its members, and how a call is answered."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from executor.engine.control import Deferred, Method, call_method
from executor.engine.seam import EngineRequest
from executor.packing import encoded
from protos.errors import BatonError, ErrorData, InternalError, RequestFailedError, describe

LINK = "leader"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class MemberCall(_Message, frozen=True):
    call_id: int
    method: str
    arguments: dict[str, Any]


class MemberSubmit(_Message, frozen=True):
    """No member can serve one; it answers so."""

    call_id: int
    request: EngineRequest


class MemberStop(_Message, frozen=True):
    """Nothing follows it."""


class JoinAck(_Message, frozen=True):
    pass


ToMember: TypeAlias = MemberCall | MemberSubmit | MemberStop | JoinAck


class Join(_Message, frozen=True):
    pass


class MemberBeat(_Message, frozen=True):
    pass


class Answer(_Message, frozen=True):
    """`value` is plain data; unset where there is an error."""

    call_id: int
    value: Any = None
    error: ErrorData | None = None


FromMember: TypeAlias = Join | MemberBeat | Answer


class RankValue(msgspec.Struct, frozen=True, array_like=True):
    """One rank's answer to a collective call."""

    rank: int
    value: Any = None
    error: ErrorData | None = None


def packed(message: object, field: str, method: str, bytes_max: int) -> msgspec.Raw:
    """The bytes that will cross, made by who offers them: what one call has too much of, or what
    cannot be encoded, is that call's RequestFailedError and never the end of a link."""
    body, problem = encoded(message, bytes_max)
    if not problem:
        return msgspec.Raw(body)
    raise RequestFailedError(
        f"the {field} of {method} cannot be sent: {problem}",
        field=field,
        value=f"{len(body)} bytes",
        limit=f"{bytes_max} bytes",
    )


def packed_answer(call: MemberCall, told: Answer, bytes_max: int) -> msgspec.Raw:
    try:
        return packed(told, "answer", call.method, bytes_max)
    except RequestFailedError as error:
        refusal = Answer(call.call_id, error=error.to_data())
        return packed(refusal, "refusal", call.method, bytes_max)


def answer(call_id: int, methods: dict[str, Method], call: MemberCall) -> Answer:
    """Run it here. An error ends the call alone and crosses as plain data."""
    try:
        value = call_method(methods, call.method, call.arguments)
        return Answer(call_id, value.finish() if isinstance(value, Deferred) else value)
    except BatonError as error:
        return Answer(call_id, error=error.to_data())
    except Exception as error:
        wrapped = InternalError(f"{call.method}: {describe(error)}")
        return Answer(call_id, error=wrapped.to_data())
