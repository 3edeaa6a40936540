"""The asyncio client: as `baton.client`, with `await` and `async for`.

    async with AsyncClient("127.0.0.1:8000") as client:
        whole = await client.generate("Once upon a time", max_tokens=32)
        async with await client.generate("Once upon a time", stream=True) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

The channel is opened by the first call, on the loop that makes it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from baton.calls import Assembler, Call, CallOptions, Message, make_abort, make_call
from baton.stubs import (
    CHANNEL_OPTIONS,
    CONTROL_TIMEOUT_S,
    Stubs,
    check_address,
    control_metadata,
    error_of_call,
)
from protos import codec, control_codec
from protos import control_pb2 as cpb
from protos.completion import Completion
from protos.errors import BatonError
from protos.messages import GenerateChunk, LedgerAudit, ServerInfo


class AsyncTokenStream(AsyncIterator[GenerateChunk]):
    """The chunks of one answer, as they come. The last one carries `finish`."""

    def __init__(self, call: Any, peer: str, started_s: float) -> None:
        self._call = call
        self._peer = peer
        self._assembler = Assembler(started_s)
        self._error: BatonError | None = None
        self._is_closed = False

    async def __anext__(self) -> GenerateChunk:
        """Raises the typed error that ended the request, and the same one ever after."""
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StopAsyncIteration
        try:
            return await self._receive()
        except grpc.RpcError as error:
            self._error = error_of_call(error, self._peer)
            raise self._error from None
        except BatonError as error:
            self._error = error
            self._call.cancel()
            raise

    async def _receive(self) -> GenerateChunk:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            self._assembler.completion()
            raise StopAsyncIteration
        chunk = codec.chunk_from_proto(message)
        self._assembler.add(chunk, time.monotonic())
        return chunk

    async def completion(self) -> Completion:
        """The whole answer; what was not read yet is read first."""
        async for _ in self:
            pass
        return self._assembler.completion()

    def close(self) -> None:
        """End the request if it still runs. Idempotent."""
        self._is_closed = True
        self._call.cancel()

    async def aclose(self) -> None:
        """As `close`, under the name that `contextlib.aclosing` wants."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


class AsyncClient:
    """Talks to a router, or straight to a server. Arguments as those of `Client`."""

    def __init__(
        self, address: str, *, timeout_s: float | None = None, control_token: str | None = None
    ) -> None:
        check_address(address)
        self.address = address
        self.timeout_s = timeout_s
        self._metadata = control_metadata(control_token)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call that is still open."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    @overload
    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: str | Sequence[int], *, stream: Literal[True], **options: Unpack[CallOptions]
    ) -> AsyncTokenStream: ...

    async def generate(
        self, prompt: str | Sequence[int], *, stream: bool = False, **options: Unpack[CallOptions]
    ) -> Completion | AsyncTokenStream:
        """Complete a text or a sequence of token ids. See `Client.generate`."""
        started_s = time.monotonic()
        call = make_call(options, self.timeout_s, prompt=prompt)
        return await self._run(started_s, call, is_streamed=stream)

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> Completion: ...

    @overload
    async def chat(
        self, messages: Sequence[Message], *, stream: Literal[True], **options: Unpack[CallOptions]
    ) -> AsyncTokenStream: ...

    async def chat(
        self, messages: Sequence[Message], *, stream: bool = False, **options: Unpack[CallOptions]
    ) -> Completion | AsyncTokenStream:
        """Answer a conversation, by the model's own chat template. Else as `generate`."""
        started_s = time.monotonic()
        call = make_call(options, self.timeout_s, messages=messages)
        return await self._run(started_s, call, is_streamed=stream)

    async def abort(self, external_id: str, *, reason: str = "") -> bool:
        """End a live request of anybody's. False where no such request lives."""
        request = make_abort(external_id, reason)
        return external_id in (await self._ask(self._stubs.inference.Abort, request)).aborted

    async def info(self) -> ServerInfo:
        """What the server is and, of a router, its servers. Needs the control token."""
        answer = await self._ask(self._stubs.control.GetServerInfo, cpb.GetServerInfoRequest())
        return control_codec.server_info_from_proto(answer)

    async def ledger(self) -> LedgerAudit:
        """Who holds which blocks; of a router, its servers' too. Needs the control token."""
        return control_codec.ledger_from_proto(
            await self._ask(self._stubs.control.GetLedger, cpb.GetLedgerRequest())
        )

    async def is_ready(self) -> bool:
        """See `Client.is_ready`."""
        answer = await self._ask(self._stubs.health.Check, health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def _stubs(self) -> Stubs:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return Stubs(self._channel)

    async def _run(
        self, started_s: float, call: Call, *, is_streamed: bool
    ) -> Completion | AsyncTokenStream:
        answer = self._stubs.inference.Generate(call.request, timeout=call.rpc_timeout_s)
        stream = AsyncTokenStream(answer, self.address, started_s)
        if is_streamed:
            return stream
        async with stream:
            return await stream.completion()

    async def _ask(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=CONTROL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of_call(error, self.address) from None
