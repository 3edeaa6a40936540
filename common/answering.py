"""What Generate, Abort and Control calls do alike, on the router and on the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from common.logs import Log
from common.metrics import Metrics
from common.rpc import check_control, fail
from common.security import ClusterSecret
from protos import inference_pb2 as pb
from protos.errors import BatonError, InternalError, InvalidRequestError

Answer = TypeVar("Answer")

ABORT_IDS_MAX = 4096
DEADLINE_S_MAX = 24 * 3600.0
"""gRPC tells a call without a deadline by one far away."""


@dataclass
class Answering:
    """`external_id` may be set as soon as it is known: the log names it then."""

    external_id: str


@asynccontextmanager
async def answering(
    context: grpc.aio.ServicerContext[Any, Any], metrics: Metrics, log: Log, external_id: str
) -> AsyncIterator[Answering]:
    """Count the call, and turn the error that ends its body into the call's status."""
    call = Answering(external_id)
    metrics.request_began()
    outcome = "cancelled"
    try:
        yield call
        outcome = "ok"
    except BatonError as error:
        outcome = error.status
        first_line = error.message.partition("\n")[0]
        log.info("request_failed", external_id=call.external_id, outcome=outcome, error=first_line)
        await fail(context, error)
    except Exception as error:
        outcome = "internal"
        log.exception("request_broke", error, external_id=call.external_id)
        await fail(context, InternalError(f"{type(error).__name__}: see the server's log"))
    finally:
        metrics.request_ended(outcome)


async def answer_control(
    context: grpc.aio.ServicerContext[Any, Any],
    secret: ClusterSecret,
    log: Log,
    answer: Callable[[], Awaitable[Answer]],
    *,
    whose: str,
) -> Answer:
    """One Control call: the key first, then the answer or the error that ends it.

    `whose` log an unexpected error is told to be in.
    """
    async with streaming_control(context, secret, log, whose=whose):
        return await answer()


@asynccontextmanager
async def streaming_control(
    context: grpc.aio.ServicerContext[Any, Any], secret: ClusterSecret, log: Log, *, whose: str
) -> AsyncIterator[None]:
    """The same around a call that answers with a stream."""
    try:
        check_control(context, secret)
        yield
    except BatonError as error:
        await fail(context, error)
    except Exception as error:
        log.exception("control_call_broke", error)
        await fail(context, InternalError(f"{type(error).__name__}: see the {whose}'s log"))


def deadline_s_of(deadline_ms: int, remaining_s: float | None, default_s: float) -> float:
    """The nearer of the call's and the request's own; the default where neither is given."""
    given = [remaining_s] if remaining_s is not None and remaining_s <= DEADLINE_S_MAX else []
    if deadline_ms:
        given.append(deadline_ms / 1000)
    return min(given, default=default_s)


def check_abort(message: pb.AbortRequest) -> None:
    """Raises InvalidRequestError for more ids than one call may name."""
    if len(message.external_ids) > ABORT_IDS_MAX:
        raise InvalidRequestError(
            f"external_ids is {len(message.external_ids)} ids; it must be at most {ABORT_IDS_MAX}",
            field="external_ids",
            value=len(message.external_ids),
            limit=ABORT_IDS_MAX,
        )
