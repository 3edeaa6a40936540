"""The Control service of the router: itself, and its servers through its eyes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import msgspec

from common.answering import Answer, answer_control
from common.logs import Log
from common.security import ClusterSecret
from protos import control_pb2 as pb
from protos import control_pb2_grpc
from protos.control_codec import (
    ledger_from_proto,
    ledger_to_proto,
    load_to_proto,
    model_info_to_proto,
    server_info_to_proto,
)
from protos.errors import InvalidRequestError
from protos.messages import LedgerAudit, Load, ModelInfo, ServerInfo, ServerLedger
from protos.status import error_from_rpc
from router.admission import Admission
from router.fleet import Fleet
from router.identity import RouterIdentity
from router.no_engine import NoEngineCalls
from router.servers import Server
from router.service import InferenceServicer
from router.shared import Shared

ASK_SERVER_S_MAX = 2.0


class ControlServicer(NoEngineCalls, control_pb2_grpc.ControlServicer):
    def __init__(
        self,
        identity: RouterIdentity,
        shared: Shared,
        admission: Admission,
        inference: InferenceServicer,
        *,
        secret: ClusterSecret,
        log: Log,
    ) -> None:
        self._identity = identity
        self._shared = shared
        self._admission = admission
        self._inference = inference
        self._secret = secret
        self._log = log
        self._load_sequence = 0

    async def GetServerInfo(self, _request: Any, context: Any) -> pb.ServerInfo:  # noqa: N802
        async def answer() -> pb.ServerInfo:
            servers = tuple(_seen(server) for server in self._shared.fleet.servers)
            return server_info_to_proto(self._identity.info(self._shared.fleet, servers))

        return await self._answer(context, answer)

    async def GetModelInfo(self, _request: Any, context: Any) -> pb.ModelInfo:  # noqa: N802
        async def answer() -> pb.ModelInfo:
            return model_info_to_proto(_model_info(self._shared.fleet))

        return await self._answer(context, answer)

    async def GetLoad(self, _request: Any, context: Any) -> pb.Load:  # noqa: N802
        async def answer() -> pb.Load:
            return load_to_proto(self.load())

        return await self._answer(context, answer)

    async def GetLedger(self, _request: Any, context: Any) -> pb.Ledger:  # noqa: N802
        async def answer() -> pb.Ledger:
            asked = [self._ask_ledger(server) for server in self._shared.fleet.servers]
            ledgers = tuple(await asyncio.gather(*asked))
            return ledger_to_proto(msgspec.structs.replace(self.audit(), servers=ledgers))

        return await self._answer(context, answer)

    async def Release(self, _request: Any, context: Any) -> pb.LeaseResponse:  # noqa: N802
        return await self._refuse_lease(context, "Release")

    async def Renew(self, _request: Any, context: Any) -> pb.LeaseResponse:  # noqa: N802
        return await self._refuse_lease(context, "Renew")

    # --- what the answers are made of ---------------------------------------------------

    def load(self) -> Load:
        self._load_sequence += 1
        return Load(
            num_running=self._admission.num_in_flight,
            tokens_in_flight=sum(server.reserved_tokens for server in self._shared.fleet.servers),
            sequence=self._load_sequence,
        )

    def audit(self) -> LedgerAudit:
        """The router's own requests by state; it holds no blocks."""
        num_reserved = sum(server.num_reserved for server in self._shared.fleet.servers)
        return LedgerAudit(
            entries_by_state=self._inference.entries_by_state(),
            counters={
                **self._admission.counters,
                "late": self._shared.num_late,
                "reservations": num_reserved,
                "calls_ending": self._shared.links.num_ending,
            },
        )

    async def _ask_ledger(self, server: Server) -> ServerLedger:
        link = self._shared.links[server.address]
        name = server.info.name if server.info else server.address
        try:
            answer = await link.control.GetLedger(
                pb.GetLedgerRequest(), metadata=link.metadata, timeout=ASK_SERVER_S_MAX
            )
        except grpc.aio.AioRpcError as error:
            return ServerLedger(name=name, error=error_from_rpc(error, server.address).message)
        return ServerLedger(name=name, ledger=ledger_from_proto(answer))

    async def _refuse_lease(self, context: Any, what: str) -> pb.LeaseResponse:
        async def answer() -> pb.LeaseResponse:
            raise InvalidRequestError(
                f"{what} is for context servers; a router holds no leases",
                field="method",
                value=what,
                limit="a context server's address",
            )

        return await self._answer(context, answer)

    async def _answer(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        answer: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        return await answer_control(context, self._secret, self._log, answer, whose="router")


def _seen(server: Server) -> ServerInfo:
    """A server as the router knows it: its own words while up or asleep,
    the reason while not."""
    known = server.info or ServerInfo(
        name=server.address, role=server.role.value, incarnation=0, version=""
    )
    state = known.state if server.is_up or server.is_asleep else "down"
    return msgspec.structs.replace(known, state=state, detail=server.reason, address=server.address)


def _model_info(fleet: Fleet) -> ModelInfo:
    """With the limits of the whole fleet. Raises ServerUnavailableError."""
    limits = fleet.limits()
    model = fleet.model
    assert model is not None, "a usable fleet has a model"
    return msgspec.structs.replace(model, limits=limits)
