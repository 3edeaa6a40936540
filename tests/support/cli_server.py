"""A server of the Inference and Control protocols that says what a test told it to say."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import codec, control_codec, control_pb2_grpc, inference_pb2_grpc
from protos import control_pb2 as cpb
from protos import inference_pb2 as pb
from protos.errors import BatonError
from protos.messages import GenerateChunk, LedgerAudit, ServerInfo
from protos.status import STATUS_DETAILS_KEY, grpc_code, status_details


@dataclass
class SayingServer(inference_pb2_grpc.InferenceServicer, control_pb2_grpc.ControlServicer):
    """`chunks` are streamed, then `error` is raised, then, if `hangs`, nothing comes."""

    chunks: Sequence[GenerateChunk] = ()
    error: BatonError | None = None
    hangs: bool = False
    server_info: ServerInfo | None = None
    ledger_error: BatonError | None = None
    audit: LedgerAudit = field(default_factory=LedgerAudit)
    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    timeouts_s: list[float | None] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    was_cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        self.timeouts_s.append(context.time_remaining())
        context.add_callback(self.was_cancelled.set)
        for chunk in self.chunks:
            yield codec.chunk_to_proto(chunk)
        if self.hangs:
            self.was_cancelled.wait(10)
        if self.error is not None:
            self._fail(context, self.error)

    def _fail(self, context: Any, error: BatonError) -> None:
        context.set_trailing_metadata(((STATUS_DETAILS_KEY, status_details(error)),))
        context.abort(grpc_code(error), error.message)

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        known = [name for name in request.external_ids if name == "live"]
        return pb.AbortResponse(aborted=known)

    def GetServerInfo(self, request: cpb.GetServerInfoRequest, context: Any) -> cpb.ServerInfo:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.error is not None:
            self._fail(context, self.error)
        assert self.server_info is not None
        return control_codec.server_info_to_proto(self.server_info)

    def GetLedger(self, request: cpb.GetLedgerRequest, context: Any) -> cpb.Ledger:
        if self.ledger_error is not None:
            self._fail(context, self.ledger_error)
        return control_codec.ledger_to_proto(self.audit)

    def Sleep(self, request: Any, context: Any) -> Any:
        assert self.error is not None, "not part of this test"
        self._fail(context, self.error)

    ListLoras = Sleep

    def _unused(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not part of this test")

    GetModelInfo = GetLoad = Release = Renew = _unused


@contextlib.contextmanager
def serving(server: SayingServer, port: int = 0) -> Iterator[SayingServer]:
    shell = grpc.server(futures.ThreadPoolExecutor(4))
    add_inference: Any = inference_pb2_grpc.add_InferenceServicer_to_server
    add_control: Any = control_pb2_grpc.add_ControlServicer_to_server
    add_inference(server, shell)
    add_control(server, shell)
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, shell)
    server.address = f"127.0.0.1:{shell.add_insecure_port(f'127.0.0.1:{port}')}"
    shell.start()
    try:
        yield server
    finally:
        server.was_cancelled.set()
        shell.stop(0).wait()
