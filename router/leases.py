"""Keeping a context server's lease alive between the legs, and giving it back.

Both are calls in the background, bounded in time. A release that does not
arrive costs nothing but time: without renewals the lease ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import grpc

from common.logs import Log
from protos import control_pb2 as cpb
from protos.codec import disagg_id_to_proto
from router.links import Links
from router.signals import Lease

RELEASE_TIMEOUT_S = 2.0
RELEASE_TRIES = 2
RENEWALS_PER_LEASE = 3


class Leases:
    def __init__(self, links: Links, log: Log) -> None:
        self._links = links
        self._log = log
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def keep(self, address: str, lease: Lease) -> Renewal:
        return Renewal(self, address, lease)

    def release(self, address: str, lease: Lease) -> None:
        self.spawn(self._release(address, lease))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[id(task)] = task
        task.add_done_callback(lambda _: self._tasks.pop(id(task), None))
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for releases on their way, then drop what is left."""
        if self._tasks:
            _, left = await asyncio.wait(tuple(self._tasks.values()), timeout=timeout_s)
            for task in left:
                task.cancel()

    async def renew(self, address: str, lease: Lease, timeout_s: float) -> bool:
        """Whether the lease is worth renewing again."""
        link = self._links[address]
        try:
            answer = await link.control.Renew(
                _lease_request(lease), metadata=link.metadata, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            self._log.warning("renew_failed", address=address, code=error.code().name)
            return True
        return bool(answer.found)

    async def _release(self, address: str, lease: Lease) -> None:
        link = self._links[address]
        for _ in range(RELEASE_TRIES):
            try:
                await link.control.Release(
                    _lease_request(lease), metadata=link.metadata, timeout=RELEASE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                code = error.code().name
            else:
                return
        self._log.warning(
            "release_failed", address=address, code=code, hand_off=lease.disagg_request_id
        )


class Renewal:
    """Renews until stopped, or until the server no longer knows the lease."""

    def __init__(self, leases: Leases, address: str, lease: Lease) -> None:
        self._leases = leases
        self._address = address
        self._lease = lease
        self._period_s = lease.lease_ms / 1000 / RENEWALS_PER_LEASE
        self._task: asyncio.Task[None] | None = None
        self._timer = self._schedule()

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _schedule(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._period_s, self._fire)

    def _fire(self) -> None:
        self._task = self._leases.spawn(self._renew())

    async def _renew(self) -> None:
        if await self._leases.renew(self._address, self._lease, self._period_s):
            self._timer = self._schedule()


def _lease_request(lease: Lease) -> cpb.LeaseRequest:
    return cpb.LeaseRequest(
        disagg_request_id=disagg_id_to_proto(lease.disagg_request_id), pull_token=lease.pull_token
    )
