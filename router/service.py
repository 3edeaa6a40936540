"""The Inference service of the router: a thin shell around live requests.

Admission first, since a refusal must cost nothing; then the request runs in the
call's own task, and its error, if it has one, becomes the call's status.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, TypeAlias

import grpc
import msgspec

from common.answering import answering, check_abort, deadline_s_of
from common.logs import Log
from common.metrics import Metrics, StreamFigures
from common.rpc import fail
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.codec import chunk_to_proto, request_from_proto
from protos.errors import InvalidRequestError
from protos.messages import GenerateChunk, GenerateRequest
from router import signals as sig
from router.admission import Admission
from router.prepare import refuse_internal_fields
from router.request import LIVE_STATES, Interrupting, LiveRequest
from router.shared import Shared

Context: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Lives on the event loop; `interrupt_all` ends what is open at shutdown."""

    def __init__(
        self,
        shared: Shared,
        admission: Admission,
        *,
        metrics: Metrics,
        log: Log,
        default_deadline_s: float,
    ) -> None:
        self._shared = shared
        self._admission = admission
        self._metrics = metrics
        self._log = log
        self._default_deadline_s = default_deadline_s
        self._live: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # --- Generate -------------------------------------------------------------------

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        received_s = asyncio.get_running_loop().time()
        async with answering(context, self._metrics, self._log, message.external_id) as call:
            request = self._admit(message)
            call.external_id = request.external_id
            await self._serve(request, context, received_s)

    def _admit(self, message: pb.GenerateRequest) -> GenerateRequest:
        """The request with its external id, which is live from here on. Raises RequestError."""
        request = request_from_proto(message)
        refuse_internal_fields(request)
        external_id = self._admission.admit(request.external_id)
        return msgspec.structs.replace(request, external_id=external_id)

    async def _serve(self, request: GenerateRequest, context: Context, received_s: float) -> None:
        external_id = request.external_id
        self._idle.clear()
        try:
            live = self._live[external_id] = LiveRequest(
                self._shared,
                request,
                deadline_s=deadline_s_of(
                    request.deadline_ms, context.time_remaining(), self._default_deadline_s
                ),
                received_s=received_s,
                write=_Writer(context, self._metrics, received_s).write,
            )
            await live.run()
        finally:
            self._live.pop(external_id, None)
            self._admission.leave(external_id)
            if not self._live:
                self._idle.set()
        seconds = asyncio.get_running_loop().time() - received_s
        self._log.info("request_finished", external_id=external_id, seconds=round(seconds, 4))

    # --- Abort ----------------------------------------------------------------------

    async def Abort(  # noqa: N802
        self,
        message: pb.AbortRequest,
        context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse],
    ) -> pb.AbortResponse:
        try:
            check_abort(message)
        except InvalidRequestError as error:
            await fail(context, error)
        reason = f"aborted: {message.reason}" if message.reason else "aborted"
        response = pb.AbortResponse()
        for external_id in message.external_ids:
            live = self._live.get(external_id)
            if live is None:
                response.unknown.append(external_id)
            else:
                live.interrupt(sig.ClientCancelled(reason))
                response.aborted.append(external_id)
        return response

    # --- for the rest of the router ----------------------------------------------------

    def entries_by_state(self) -> dict[str, int]:
        """How many live requests are in each state; every state is named."""
        counts = Counter(live.state for live in tuple(self._live.values()))
        return {name: counts[name] for name in LIVE_STATES}

    def server_silent(self, address: str, reason: str) -> None:
        """Ends the legs that run on a server which stopped answering."""
        for live in tuple(self._live.values()):
            live.server_silent(address, reason)

    def servers_changed(self) -> None:
        """Ends the requests that can no longer be carried to their end."""
        for live in tuple(self._live.values()):
            live.servers_changed()

    def interrupt_all(self, event: Interrupting) -> int:
        for live in tuple(self._live.values()):
            live.interrupt(event)
        return len(self._live)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether no request was open any more within that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class _Writer:
    """Chunks onto one call, with the times between tokens observed."""

    def __init__(self, context: Context, metrics: Metrics, received_s: float) -> None:
        self._context = context
        self._figures = StreamFigures(metrics, received_s)
        self._now: Any = asyncio.get_running_loop().time

    async def write(self, chunk: GenerateChunk) -> None:
        self._figures.tokens(len(chunk.token_ids), self._now())
        finish = chunk.finish
        if finish is not None and finish.generation_timing is not None:
            self._figures.transfer(finish.kv, finish.generation_timing.transfer_ms)
        await self._context.write(chunk_to_proto(chunk))
