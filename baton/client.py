"""The synchronous client. It stands on `protos` alone: no torch, no engine.

    with Client("127.0.0.1:8000", timeout_s=60) as client:
        whole = client.generate("Once upon a time", max_tokens=32)
        with client.generate("Once upon a time", stream=True) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)

Life of a `TokenStream`: open -> iterated to the end, failed, or closed. Closing
it early ends the request on the servers and frees all it holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, Unpack, overload

import grpc
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


class TokenStream(Iterator[GenerateChunk]):
    """The chunks of one answer, as they come. The last one carries `finish`."""

    def __init__(self, call: Any, peer: str, started_s: float) -> None:
        self._call = call
        self._peer = peer
        self._assembler = Assembler(started_s)
        self._error: BatonError | None = None
        self._is_closed = False

    def __next__(self) -> GenerateChunk:
        """Raises the typed error that ended the request, and the same one ever after."""
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StopIteration
        try:
            return self._receive()
        except grpc.RpcError as error:
            self._error = error_of_call(error, self._peer)
            raise self._error from None
        except BatonError as error:
            self._error = error
            self._call.cancel()
            raise

    def _receive(self) -> GenerateChunk:
        message = next(self._call, None)
        if message is None:
            self._assembler.completion()
            raise StopIteration
        chunk = codec.chunk_from_proto(message)
        self._assembler.add(chunk, time.monotonic())
        return chunk

    def completion(self) -> Completion:
        """The whole answer; what was not read yet is read first."""
        for _ in self:
            pass
        return self._assembler.completion()

    def close(self) -> None:
        """End the request if it still runs. Idempotent."""
        self._is_closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Client:
    """Talks to a router, or straight to a server.

    `timeout_s` is the deadline of every request that names none; None leaves it
    to the server's default. `control_token` opens the operator's calls, `info`
    and `ledger`; generating needs none. Raises ConfigError for an address that is none.
    """

    def __init__(
        self, address: str, *, timeout_s: float | None = None, control_token: str | None = None
    ) -> None:
        check_address(address)
        self.address = address
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stubs = Stubs(self._channel)
        self._metadata = control_metadata(control_token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call that is still open."""
        self._channel.close()

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: str | Sequence[int], *, stream: Literal[True], **options: Unpack[CallOptions]
    ) -> TokenStream: ...

    def generate(
        self, prompt: str | Sequence[int], *, stream: bool = False, **options: Unpack[CallOptions]
    ) -> Completion | TokenStream:
        """Complete a text or a sequence of token ids.

        `options` are those of `CallOptions`, such as `max_tokens=32,
        temperature=0.8`. Raises the errors of `baton.errors`; with
        `stream=True` they are raised by the iteration.
        """
        started_s = time.monotonic()
        call = make_call(options, self.timeout_s, prompt=prompt)
        return self._run(started_s, call, is_streamed=stream)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> Completion: ...

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[True], **options: Unpack[CallOptions]
    ) -> TokenStream: ...

    def chat(
        self, messages: Sequence[Message], *, stream: bool = False, **options: Unpack[CallOptions]
    ) -> Completion | TokenStream:
        """Answer a conversation, by the model's own chat template. Else as `generate`."""
        started_s = time.monotonic()
        call = make_call(options, self.timeout_s, messages=messages)
        return self._run(started_s, call, is_streamed=stream)

    def abort(self, external_id: str, *, reason: str = "") -> bool:
        """End a live request of anybody's. False where no such request lives."""
        request = make_abort(external_id, reason)
        answer = self._ask(self._stubs.inference.Abort, request)
        return external_id in answer.aborted

    def info(self) -> ServerInfo:
        """What the server is and, of a router, its servers. Needs the control token."""
        answer = self._ask(self._stubs.control.GetServerInfo, cpb.GetServerInfoRequest())
        return control_codec.server_info_from_proto(answer)

    def ledger(self) -> LedgerAudit:
        """Who holds which blocks; of a router, its servers' too. Needs the control token."""
        return control_codec.ledger_from_proto(
            self._ask(self._stubs.control.GetLedger, cpb.GetLedgerRequest())
        )

    def is_ready(self) -> bool:
        """Whether the server's health service says that it serves. Needs no token.

        Raises ServerUnavailableError where nobody answers.
        """
        answer = self._ask(self._stubs.health.Check, health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _run(self, started_s: float, call: Call, *, is_streamed: bool) -> Completion | TokenStream:
        answer = self._stubs.inference.Generate(call.request, timeout=call.rpc_timeout_s)
        stream = TokenStream(answer, self.address, started_s)
        if is_streamed:
            return stream
        with stream:
            return stream.completion()

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=CONTROL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of_call(error, self.address) from None
