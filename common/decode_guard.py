"""A message that is no protobuf is the caller's mistake, and is told so.

gRPC answers an undecodable request with UNKNOWN and the text of a Python
exception. Here the decoding of our own services yields a marker instead, and
the call then ends by InvalidRequestError like every other bad request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from protos.errors import BatonError, InvalidRequestError

OUR_METHODS = "/baton.v1."

Fail = Callable[[Any, BatonError], Awaitable[Any]]


class _Undecodable:
    """Stands in the place of a request that could not be decoded."""

    def __init__(self, num_bytes: int) -> None:
        self.error = InvalidRequestError(
            f"request is {num_bytes} bytes; it must be a valid protobuf message of this method, "
            "with UTF-8 in its strings",
            field="request",
            value=f"{num_bytes} bytes",
            limit="a valid protobuf message",
        )


class DecodeGuard(grpc.aio.ServerInterceptor):
    """`fail` ends a call by an error of ours."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OUR_METHODS):
            return handler
        decode = _guarded(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._checked(handler.unary_stream), decode, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._checked(handler.unary_unary), decode, handler.response_serializer
        )

    def _checked(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Our methods are coroutines, the streaming one too: it writes to its context."""

        async def checked(request: Any, context: Any) -> Any:
            if isinstance(request, _Undecodable):
                return await self._fail(context, request.error)
            return await answer(request, context)

        return checked


def _guarded(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _Undecodable(len(data))

    return decode_or_mark
