"""The Control service of one server. Every call needs the control token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from common.answering import Answer, answer_control, streaming_control
from common.logs import Log
from executor.executor import GenerationExecutor
from protos import control_pb2 as pb
from protos import control_pb2_grpc
from protos.codec import disagg_id_from_proto
from protos.control_codec import (
    ledger_to_proto,
    load_to_proto,
    model_info_to_proto,
    server_info_to_proto,
)
from protos.errors import InvalidRequestError
from serving.engine_control import Context, EngineControlCalls
from serving.state import ServerState


class ControlServicer(EngineControlCalls, control_pb2_grpc.ControlServicer):
    """Answers in every phase what can be answered in it."""

    def __init__(self, state: ServerState, log: Log) -> None:
        self._state = state
        self._log = log

    def executor(self) -> GenerationExecutor:
        return self._state.running().executor

    def follow_engine(self) -> None:
        self._state.follow_engine()

    async def GetServerInfo(self, _request: Any, context: Any) -> pb.ServerInfo:  # noqa: N802
        async def answer() -> pb.ServerInfo:
            return server_info_to_proto(self._state.info())

        return await self.answer(context, answer)

    async def GetModelInfo(self, _request: Any, context: Any) -> pb.ModelInfo:  # noqa: N802
        async def answer() -> pb.ModelInfo:
            return model_info_to_proto(self.executor().identity.model_info)

        return await self.answer(context, answer)

    async def GetLoad(self, _request: Any, context: Any) -> pb.Load:  # noqa: N802
        async def answer() -> pb.Load:
            return load_to_proto(await self.executor().load())

        return await self.answer(context, answer)

    async def Release(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:  # noqa: N802
        async def answer() -> pb.LeaseResponse:
            _check_lease(request)
            executor = self.executor()
            disagg_id = disagg_id_from_proto(request.disagg_request_id)
            return pb.LeaseResponse(found=await executor.release(disagg_id, request.pull_token))

        return await self.answer(context, answer)

    async def Renew(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:  # noqa: N802
        async def answer() -> pb.LeaseResponse:
            _check_lease(request)
            executor = self.executor()
            disagg_id = disagg_id_from_proto(request.disagg_request_id)
            return pb.LeaseResponse(found=await executor.renew(disagg_id, request.pull_token))

        return await self.answer(context, answer)

    async def GetLedger(self, _request: Any, context: Any) -> pb.Ledger:  # noqa: N802
        async def answer() -> pb.Ledger:
            return ledger_to_proto(await self.executor().audit())

        return await self.answer(context, answer)

    async def answer(
        self,
        context: Context,
        answer: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        return await answer_control(context, self._state.secret, self._log, answer, whose="server")

    def streaming(self, context: Context) -> AbstractAsyncContextManager[None]:
        return streaming_control(context, self._state.secret, self._log, whose="server")


def _check_lease(request: pb.LeaseRequest) -> None:
    if not request.HasField("disagg_request_id"):
        raise InvalidRequestError(
            "disagg_request_id is absent; it must be given",
            field="disagg_request_id",
            value="absent",
            limit="given",
        )
