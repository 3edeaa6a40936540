"""One answer on its way out: chunks in, messages written, times and bytes counted."""

from __future__ import annotations

import time

import grpc

from common.metrics import Metrics, StreamFigures
from executor.request import ExecutorRequest
from executor.result import GenerationResult, ResultChunk
from protos import inference_pb2 as pb
from protos.codec import chunk_to_proto
from protos.errors import InternalError
from protos.messages import ContextPhaseParams, GenerateChunk
from serving.role import Outcome, Role


class StreamWriter:
    """Writes one result to one call.

    `has_finished` says that the executor's request ended by itself; `lease`
    is the lease it left, and `has_handed_over` that the client was told of it
    (or that there was none).
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
        metrics: Metrics,
        received_s: float,
    ) -> None:
        self.has_finished = False
        self.has_handed_over = False
        self.lease: ContextPhaseParams | None = None
        self._context = context
        self._figures = StreamFigures(metrics, received_s)
        self._is_first_message = True

    async def run(
        self, result: GenerationResult, request: ExecutorRequest, role: Role, model: str
    ) -> None:
        """Until the last message is written. Raises the BatonError that ended the result."""
        async for chunk in result:
            self._figures.tokens(len(chunk.token_ids), time.monotonic())
            message = self._message(chunk, request)
            if chunk.finish is None:
                await self._context.write(chunk_to_proto(message))
                continue
            self.has_finished = True
            self.lease = chunk.finish.context_phase_params
            await self._write_last(chunk, message, request, role, model)
            return
        raise InternalError("the executor's result ended without a finish")

    async def _write_last(
        self,
        chunk: ResultChunk,
        message: GenerateChunk,
        request: ExecutorRequest,
        role: Role,
        model: str,
    ) -> None:
        assert chunk.finish is not None
        outcome = Outcome(
            request=request,
            model=model,
            finish=chunk.finish,
            stop_string=chunk.stop_string,
        )
        ending = role.end(outcome)
        last = GenerateChunk(
            external_id=message.external_id,
            token_index=message.token_index,
            token_ids=message.token_ids,
            text=message.text,
            text_offset=message.text_offset,
            seed=message.seed,
            finish=ending.finish,
            context_phase_params=ending.context_phase_params,
        )
        await self._context.write(chunk_to_proto(last))
        self.has_handed_over = self.lease is None or ending.context_phase_params is not None
        self._figures.transfer(chunk.finish.kv, chunk.finish.timing.transfer_ms)

    def _message(self, chunk: ResultChunk, request: ExecutorRequest) -> GenerateChunk:
        seed = request.sampling.seed if self._is_first_message else None
        self._is_first_message = False
        return GenerateChunk(
            external_id=request.external_id,
            token_index=chunk.token_index,
            token_ids=chunk.token_ids,
            text=chunk.text,
            text_offset=chunk.text_offset,
            seed=seed or 0,
        )
