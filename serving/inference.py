"""The Inference service over an executor: what comes by wire becomes a checked request.

A call's way: checks that need no model, the role's types, an open external id,
tokens, the role's rules, the executor; then each chunk is written as it comes.
A stream ends by exactly one message with `finish`, or by one gRPC status with
details. A client that goes away stops its request at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeAlias

import grpc
import msgspec

from common.answering import answering, check_abort, deadline_s_of
from common.logs import Log
from common.metrics import Metrics
from common.rpc import check_control, fail
from common.text.prompt import prompt_token_ids
from executor.request import ExecutorRequest
from executor.result import GenerationResult
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.checks import check_model
from protos.codec import request_from_proto
from protos.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    shorten,
)
from protos.messages import GenerateRequest, RequestType
from serving.live import LiveRequest, LiveRequests
from serving.role import Admission, Role
from serving.state import ServerState, Serving
from serving.stream import StreamWriter

Context: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Lives on the event loop; `close` ends what it left running behind its calls."""

    def __init__(
        self,
        state: ServerState,
        role: Role,
        *,
        live: LiveRequests,
        metrics: Metrics,
        log: Log,
        default_deadline_s: float,
        max_unread_tokens: int,
    ) -> None:
        self._state = state
        self._role = role
        self._live = live
        self._metrics = metrics
        self._log = log
        self._default_deadline_s = default_deadline_s
        self._max_unread_tokens = max_unread_tokens
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(  # noqa: N802 - the stub's name
        self, message: pb.GenerateRequest, context: Context
    ) -> None:
        received_s = time.monotonic()
        async with answering(context, self._metrics, self._log, message.external_id):
            await self._generate(message, context, received_s)

    async def _generate(
        self, message: pb.GenerateRequest, context: Context, received_s: float
    ) -> None:
        serving = self._state.serving()
        if message.HasField("disagg_request_id"):
            check_control(context, self._state.secret)
        request = request_from_proto(message)
        self._role.check_type(request.request_type)
        if not request.external_id:
            request = msgspec.structs.replace(request, external_id=f"r-{secrets.token_hex(12)}")
        live = self._live.open(request.external_id)
        self._idle.clear()
        try:
            ends_s = received_s + deadline_s_of(
                request.deadline_ms, context.time_remaining(), self._default_deadline_s
            )
            prepared = await self._prepare(request, serving, ends_s)
            writer = StreamWriter(context, self._metrics, received_s)
            await self._run(prepared, serving, live, writer)
            self._log.info(
                "request_finished",
                external_id=request.external_id,
                type=request.request_type,
                prompt_tokens=len(prepared.prompt_token_ids),
                seconds=round(time.monotonic() - received_s, 4),
            )
        finally:
            self._live.close(live)
            if len(self._live) == 0:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether no request was open any more within that time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _prepare(
        self, request: GenerateRequest, serving: Serving, ends_s: float
    ) -> ExecutorRequest:
        identity = serving.executor.identity
        limits = identity.model_info.limits
        check_model(request.model, limits)
        prompt = await prompt_token_ids(request, serving.tokenizer, limits, "this server")
        deadline_s = ends_s - time.monotonic()
        if deadline_s <= 0:
            raise DeadlineExceededError("the deadline passed before the request could start")
        prepared = self._role.prepare(
            Admission(
                request=request,
                prompt_token_ids=prompt,
                deadline_s=deadline_s,
                identity=identity,
            )
        )
        return msgspec.structs.replace(prepared, max_unread_tokens=self._max_unread_tokens)

    async def _run(
        self, request: ExecutorRequest, serving: Serving, live: LiveRequest, writer: StreamWriter
    ) -> None:
        self._state.serving()  # the server may have begun to drain while we tokenised
        if live.ending is not None:
            raise live.ending
        result = serving.executor.submit(request)
        live.attach(result)
        model = serving.executor.identity.model_info.limits.model
        try:
            await writer.run(result, request, self._role, model)
        except RequestCancelledError as error:
            raise live.ending or error from None
        finally:
            if not writer.has_finished:
                result.abort()
            if request.request_type is RequestType.CONTEXT_ONLY and not writer.has_handed_over:
                self._spawn(_let_go(result, serving, writer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[id(task)] = task
        task.add_done_callback(lambda done: self._tasks.pop(id(done), None))

    async def Abort(  # noqa: N802 - the stub's name
        self,
        message: pb.AbortRequest,
        context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse],
    ) -> pb.AbortResponse:
        try:
            check_abort(message)
        except InvalidRequestError as error:
            await fail(context, error)
        response = pb.AbortResponse()
        why = f": {shorten(message.reason)}" if message.reason else ""
        for external_id in message.external_ids:
            live = self._live.find(external_id)
            if live is not None:
                live.end(RequestCancelledError(f"aborted by the client{why}"))
            elif not await self._abort_elsewhere(external_id):
                response.unknown.append(external_id)
                continue
            response.aborted.append(external_id)
            self._log.info("request_aborted", external_id=external_id)
        return response

    async def _abort_elsewhere(self, external_id: str) -> bool:
        """It may be a request of another frontend of the same engine."""
        try:
            return await self._state.running().executor.abort_named(external_id)
        except BatonError:
            return False  # without an engine there is nothing to abort

    async def close(self) -> None:
        """Stop what still runs behind ended calls; the executor's end frees the rest."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _let_go(result: GenerationResult, serving: Serving, writer: StreamWriter) -> None:
    """Free the KV of a context phase whose hand-off reached nobody.

    Its result may have finished while the client went away: then the lease is
    in place already, and nobody else knows of it.
    """
    params = writer.lease
    try:
        if not writer.has_finished:
            async for chunk in result:
                if chunk.finish is not None:
                    params = chunk.finish.context_phase_params
                    break
        if params is not None:
            await serving.executor.release(params.disagg_request_id, params.pull_token)
    except BatonError:
        return  # it ended without a lease, or the engine is gone and its leases with it
