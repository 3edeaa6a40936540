"""Stopping a context leg without losing the lease that it may just have made.

Cancelling the call would drop a hand-off that is already on its way to us, and
its KV would stay pinned until the lease ends by itself. So the server is told by
Abort, which stops the work as fast, and the stream is read to its end: a hand-off
that comes all the same is released. Every wait is bounded; then the call is cancelled.
"""

from __future__ import annotations

import asyncio

import grpc

from protos import inference_pb2 as pb
from router import signals as sig
from router.leases import Leases
from router.legs import OpenLeg
from router.links import Link

ABANDON_S_MAX = 1.0


async def abandon(leg: OpenLeg, link: Link, leases: Leases) -> None:
    """`leg` is a context leg that nobody reads any more."""
    try:
        async with asyncio.timeout(ABANDON_S_MAX):
            await _abort(leg, link)
            while not leg.is_ended:
                _release(await leg.next_event(), leg, leases)
    except TimeoutError:
        pass
    finally:
        if not leg.is_ended:
            leg.call.cancel()


async def _abort(leg: OpenLeg, link: Link) -> None:
    message = pb.AbortRequest(external_ids=[leg.external_id], reason="the client's request ended")
    try:
        await link.inference.Abort(message, metadata=link.metadata, timeout=ABANDON_S_MAX)
    except grpc.aio.AioRpcError:
        return  # the stream tells the same


def _release(event: sig.Event, leg: OpenLeg, leases: Leases) -> None:
    if isinstance(event, sig.ContextFinished) and event.params is not None:
        params = event.params
        lease = sig.Lease(params.disagg_request_id, params.pull_token, params.lease_ms)
        leases.release(leg.reservation.address, lease)
