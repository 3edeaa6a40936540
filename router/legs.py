"""One leg: a call to one server, read as the events of a request's machine.

Life: opened with a reservation, read until its last message or its failure,
then let go. A failure's message names the server and the phase.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from protos.codec import chunk_from_proto, decode_params, request_to_proto
from protos.errors import (
    BatonError,
    InternalError,
    InvalidRequestError,
    KvTransferError,
    RequestCancelledError,
    RequestFailedError,
    ServerUnavailableError,
)
from protos.messages import GenerateChunk, GenerateRequest
from protos.status import STATUS_DETAILS_KEY, error_from_rpc
from router import signals as sig
from router.links import Link
from router.servers import Reservation
from router.signals import Event, Leg

DEADLINE_MARGIN_S = 0.5
"""A leg's call ends this long after the request's own deadline, which tells the client more."""

_NAMED = (
    ServerUnavailableError,
    KvTransferError,
    RequestFailedError,
    RequestCancelledError,
    InternalError,
)
_PHASES = {
    Leg.CONTEXT: "context phase",
    Leg.GENERATION: "generation phase",
    Leg.WHOLE: "both phases",
}


class OpenLeg:
    def __init__(
        self, leg: Leg, reservation: Reservation, label: str, link: Link, request: GenerateRequest
    ) -> None:
        """Starts the call. `label` is the server's name as messages show it."""
        self.leg = leg
        self.external_id = request.external_id
        self.is_abandoned = False
        """Whether somebody else reads it to its end."""
        self._reading: asyncio.Future[Any] | None = None
        self.reservation = reservation
        self._label = label
        self.is_ended = False
        """Whether the server has said its last word."""
        self.has_lost_server = False
        """Whether the failure was the connection's and not one that the server told."""
        self.call: Any = link.inference.Generate(
            request_to_proto(request),
            metadata=link.metadata,
            timeout=request.deadline_ms / 1000 + DEADLINE_MARGIN_S,
        )

    async def next_event(self) -> Event:
        """The next message as an event; a failure is one too. Raises CancelledError only."""
        try:
            message = await self._read()
        except grpc.aio.AioRpcError as error:
            self.is_ended = True
            keys = [key for key, _ in error.trailing_metadata() or ()]
            is_told = STATUS_DETAILS_KEY in keys
            self.has_lost_server = error.code() is grpc.StatusCode.UNAVAILABLE and not is_told
            return self.failed(error_from_rpc(error))
        if message is grpc.aio.EOF:
            self.is_ended = True
            return self.failed(InternalError("the stream ended without a finish"))
        self.is_ended = message.HasField("finish")
        return self._event(chunk_from_proto(message))

    async def _read(self) -> Any:
        """The next message. A context leg's read outlives a cancelled wait for it.

        gRPC cancels a call whose read is cancelled, and with it a hand-off that
        has already come; only `router.abandon` may decide that.
        """
        if self.leg is not Leg.CONTEXT:
            return await self.call.read()
        if self._reading is None:
            self._reading = asyncio.ensure_future(self.call.read())
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    def failed(self, error: BatonError) -> sig.LegFailed:
        if isinstance(error, _NAMED):
            error = type(error)(
                f"{self.reservation.role} server {self._label}, {_PHASES[self.leg]}: "
                f"{error.message}",
                field=error.field,
                value=error.value,
                limit=error.limit,
            )
        return leg_failed(self.leg, error)

    def _event(self, chunk: GenerateChunk) -> Event:
        is_last = chunk.finish is not None
        match self.leg:
            case Leg.CONTEXT:
                return self._context_finished(chunk) if is_last else sig.ContextChunk(chunk)
            case Leg.GENERATION:
                return sig.GenerationFinished(chunk) if is_last else sig.GenerationChunk(chunk)
            case Leg.WHOLE:
                return sig.WholeFinished(chunk) if is_last else sig.WholeChunk(chunk)

    def _context_finished(self, chunk: GenerateChunk) -> Event:
        signed = chunk.context_phase_params
        if signed is None:
            return sig.ContextFinished(chunk, None)
        try:
            return sig.ContextFinished(chunk, decode_params(signed.payload))
        except InvalidRequestError as error:
            return self.failed(InternalError(error.message))


def leg_failed(leg: Leg, error: BatonError) -> sig.LegFailed:
    match leg:
        case Leg.CONTEXT:
            return sig.ContextFailed(error)
        case Leg.GENERATION:
            return sig.GenerationFailed(error)
        case Leg.WHOLE:
            return sig.WholeFailed(error)
