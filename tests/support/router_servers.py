"""Scripted context and generation servers: real gRPC, no engine.

Token i of a prompt's completion is `token_at(prompt, i)`, whichever server makes
it. `Script` says what goes wrong. `python -m tests.support.router_servers` runs
one as a process of its own, for tests that kill or stop it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec

from common.hashing import prompt_digest
from common.rpc import bind, check_control, fail, new_server
from common.security import ClusterSecret, load_secret
from protos import control_pb2 as cpb
from protos import control_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.codec import (
    chunk_to_proto,
    decode_params,
    disagg_id_from_proto,
    encode_params,
    request_from_proto,
)
from protos.control_codec import (
    ledger_to_proto,
    load_to_proto,
    model_info_to_proto,
    server_info_to_proto,
)
from protos.errors import BatonError, RequestCancelledError
from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    Finish,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    KvLayout,
    KvStats,
    LedgerAudit,
    Load,
    ModelInfo,
    ModelLimits,
    RequestType,
    ServerInfo,
    StageTimes,
    Usage,
)
from protos.tokens import pack_token_ids

LAYOUT = KvLayout(
    dtype="float32",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    tokens_per_block=16,
    model_fingerprint="scripted",
)
LIMITS = ModelLimits(model="scripted", vocab_size=1000, max_prompt_tokens=512, max_total_tokens=600)


def token_at(prompt: Sequence[int], index: int) -> int:
    return (sum(prompt) * 7 + index * 13) % 1000


def text_at(prompt: Sequence[int], index: int) -> str:
    return f"<{token_at(prompt, index)}>"


def completion(prompt: Sequence[int], num_tokens: int) -> tuple[list[int], str]:
    indices = range(num_tokens)
    return [token_at(prompt, i) for i in indices], "".join(text_at(prompt, i) for i in indices)


@dataclass
class Script:
    """What a server does besides answering as it should."""

    step_s: float = 0.0
    stop_at: int | None = None
    """Index of the token that is the end-of-sequence token."""
    hang_at: int | None = None
    """Index of the token before which it waits for ever."""
    fail_at: int | None = None
    error: BatonError | None = None
    """Raised before token `fail_at`."""
    skip_at: int | None = None
    """Index of a token that is left out, so that the next one comes too early."""
    lease_ms: int = 10_000
    params_missing: bool = False


@dataclass
class Seen:
    """What a server was asked, in order."""

    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    renewed: list[DisaggRequestId] = field(default_factory=list)
    released: list[DisaggRequestId] = field(default_factory=list)


class ScriptedServer(inference_pb2_grpc.InferenceServicer, control_pb2_grpc.ControlServicer):
    """Both services of one server; `leases` are those it gave and nobody took or released."""

    def __init__(
        self,
        role: str,
        secret: ClusterSecret,
        *,
        name: str = "",
        limits: ModelLimits = LIMITS,
        layout: KvLayout = LAYOUT,
        incarnation: int = 1,
    ) -> None:
        self.role = role
        self.name = name or f"{role}-0"
        self.script = Script()
        self.seen = Seen()
        self.leases: dict[DisaggRequestId, bytes] = {}
        self.num_open = 0
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._aborted: dict[str, None] = {}
        self.state = "ready"
        self.incarnation = incarnation
        self.pullers: list[ScriptedServer] = []
        self._limits = limits
        self._layout = layout
        self._secret = secret
        self.address = ""

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        self._server = new_server()
        self.address = bind(self._server, listen)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        await self._server.stop(0)

    # --- Inference --------------------------------------------------------------

    async def Generate(self, message: Any, context: Any) -> None:
        request = request_from_proto(message)
        self.seen.requests.append(request)
        self.num_open += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request.external_id] = task
        try:
            await self._generate(request, context)
        except asyncio.CancelledError:
            self.seen.cancelled.append(request.external_id)
            if request.request_type is RequestType.CONTEXT_ONLY:
                assert request.disagg_request_id is not None
                self.leases.pop(request.disagg_request_id, None)
            if request.external_id not in self._aborted:
                raise
            task.uncancel()
            await fail(context, RequestCancelledError("aborted"))
        except BatonError as error:
            await fail(context, error)
        finally:
            self.num_open -= 1
            del self._tasks[request.external_id]

    async def Abort(self, request: Any, context: Any) -> pb.AbortResponse:
        response = pb.AbortResponse()
        for external_id in request.external_ids:
            task = self._tasks.get(external_id)
            (response.unknown if task is None else response.aborted).append(external_id)
            if task is not None:
                self._aborted[external_id] = None
                task.cancel()
        return response

    async def _generate(self, request: GenerateRequest, context: Any) -> None:
        if request.disagg_request_id is not None:
            check_control(context, self._secret)
        prompt = request.token_ids or ()
        first, last = self._span(request)
        offset = sum(len(text_at(prompt, i)) for i in range(first))
        for index in range(first, last):
            await self._misbehave(index)
            if first == 1 and index == 1:
                self._pull(request)
            text = text_at(prompt, index)
            is_stop = index == self.script.stop_at
            is_last = is_stop or index == last - 1
            chunk = GenerateChunk(
                external_id=request.external_id,
                token_index=index,
                token_ids=(token_at(prompt, index),),
                text=text,
                text_offset=offset,
                seed=request.sampling.seed or 0,
            )
            offset += len(text)
            if is_last:
                chunk = self._last(request, chunk, index - first + 1, is_stop=is_stop)
            if index != self.script.skip_at:
                await context.write(chunk_to_proto(chunk))
            if is_last:
                return

    def _span(self, request: GenerateRequest) -> tuple[int, int]:
        if request.request_type is RequestType.CONTEXT_ONLY:
            return 0, 1
        assert request.sampling.max_tokens is not None
        is_continued = request.request_type is RequestType.GENERATION_ONLY
        return int(is_continued), request.sampling.max_tokens

    async def _misbehave(self, index: int) -> None:
        if self.script.step_s:
            await asyncio.sleep(self.script.step_s)
        if index == self.script.hang_at:
            await asyncio.sleep(3600)
        if index == self.script.fail_at and self.script.error is not None:
            raise self.script.error

    def _pull(self, request: GenerateRequest) -> None:
        signed = request.context_phase_params
        assert signed is not None
        self._secret.verify_params(signed)
        params = decode_params(signed.payload)
        for server in self.pullers:
            server.leases.pop(params.disagg_request_id, None)

    def _last(
        self, request: GenerateRequest, chunk: GenerateChunk, num_streamed: int, *, is_stop: bool
    ) -> GenerateChunk:
        prompt = request.token_ids or ()
        hands_over = request.request_type is RequestType.CONTEXT_ONLY and not is_stop
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        times = StageTimes(first_token_ms=1.0, finished_ms=2.0)
        is_context = request.request_type is RequestType.CONTEXT_ONLY
        usage = Usage(prompt_tokens=len(prompt), cached_tokens=1, completion_tokens=num_streamed)
        finish = Finish(
            reason=FinishReason.CONTEXT if hands_over else reason,
            stop_token_id=chunk.token_ids[0] if is_stop else None,
            usage=usage,
            kv=KvStats(transferred_blocks=0 if is_context else 3),
            context_timing=times if is_context else None,
            generation_timing=None if is_context else times,
        )
        params = None
        if hands_over and not self.script.params_missing:
            params = self._secret.sign_params(encode_params(self._lease(request, chunk, usage)))
        return msgspec.structs.replace(chunk, finish=finish, context_phase_params=params)

    def _lease(
        self, request: GenerateRequest, chunk: GenerateChunk, usage: Usage
    ) -> ContextPhaseParams:
        assert request.disagg_request_id is not None
        prompt = request.token_ids or ()
        self.leases[request.disagg_request_id] = b"pull"
        return ContextPhaseParams(
            first_token_ids=chunk.token_ids,
            disagg_request_id=request.disagg_request_id,
            server_name=self.name,
            incarnation=self.incarnation,
            rank_addresses=(b"address",),
            transport="inproc",
            layout=self._layout,
            num_prompt_tokens=len(prompt),
            prompt_digest=prompt_digest(pack_token_ids(prompt)),
            block_hashes=(),
            lease_ms=self.script.lease_ms,
            pull_token=b"pull",
            usage=usage,
            model=self._limits.model,
            seed=request.sampling.seed or 0,
        )

    # --- Control ----------------------------------------------------------------

    async def GetServerInfo(self, request: Any, context: Any) -> cpb.ServerInfo:
        await self._check(context)
        return server_info_to_proto(
            ServerInfo(
                name=self.name,
                role=self.role,
                incarnation=self.incarnation,
                version="test",
                model=self._limits.model,
                layout=self._layout,
                transport="inproc",
                state=self.state,
            )
        )

    async def GetModelInfo(self, request: Any, context: Any) -> cpb.ModelInfo:
        await self._check(context)
        info = ModelInfo(
            limits=self._limits, dtype="float32", num_parameters=1, architecture="scripted"
        )
        return model_info_to_proto(info)

    async def GetLoad(self, request: Any, context: Any) -> cpb.Load:
        await self._check(context)
        return load_to_proto(Load(num_running=self.num_open))

    async def GetLedger(self, request: Any, context: Any) -> cpb.Ledger:
        await self._check(context)
        return ledger_to_proto(LedgerAudit(entries_by_state={"running": self.num_open}))

    async def Renew(self, request: Any, context: Any) -> cpb.LeaseResponse:
        await self._check(context)
        disagg_id = disagg_id_from_proto(request.disagg_request_id)
        self.seen.renewed.append(disagg_id)
        return cpb.LeaseResponse(found=disagg_id in self.leases)

    async def Release(self, request: Any, context: Any) -> cpb.LeaseResponse:
        await self._check(context)
        disagg_id = disagg_id_from_proto(request.disagg_request_id)
        self.seen.released.append(disagg_id)
        assert request.pull_token == b"pull"
        return cpb.LeaseResponse(found=self.leases.pop(disagg_id, None) is not None)

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            check_control(context, self._secret)
        except BatonError as error:
            await fail(context, error)


@asynccontextmanager
async def scripted_pair(
    secret: ClusterSecret,
) -> AsyncIterator[tuple[ScriptedServer, ScriptedServer]]:
    """One context and one generation server that pulls from it."""
    context, generation = ScriptedServer("context", secret), ScriptedServer("generation", secret)
    generation.pullers.append(context)
    await context.start()
    await generation.start()
    try:
        yield context, generation
    finally:
        await context.stop()
        await generation.stop()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    parser.add_argument("--secret", type=Path, required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    server = ScriptedServer(options.role, load_secret(options.secret))
    server.script.step_s = options.step_s
    print(await server.start(options.listen), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
