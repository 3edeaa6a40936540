"""One task per server: who is it, is it there, how loaded is it.

    probing ──answered, ready──> up ──probe each heartbeat_s──> up
       └──no answer / not ready / wrong role──> down ──after heartbeat_s, or when woken──> probing

A refused connection is known at once. A server that is silent for
heartbeat_timeout_s is declared gone, and its open streams are told, since
nothing else would end them. The same for one that answers, but says that its
engine is stalled: the server watches its engine itself. A load that does not come
says nothing more: an engine tells it between two steps, and a step may be long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from common.logs import Log
from protos import control_pb2 as cpb
from protos.control_codec import load_from_proto, model_info_from_proto, server_info_from_proto
from protos.status import error_from_rpc
from router.fleet import Fleet
from router.links import Link

STREAMING_STATES = ("ready", "draining")
"""In which a server may still be answering what it has taken."""


class Watcher:
    def __init__(
        self,
        link: Link,
        fleet: Fleet,
        *,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
        on_change: Callable[[], Awaitable[None]],
        on_silent: Callable[[str, str], None],
        log: Log,
    ) -> None:
        """`on_silent(address, reason)` ends the streams of a server that stopped answering."""
        self._link = link
        self._fleet = fleet
        self._heartbeat_s = heartbeat_s
        self._timeout_s = heartbeat_timeout_s
        self._on_change = on_change
        self._on_silent = on_silent
        self._log = log
        self._is_up = False
        self._reason = ""
        self._incarnation: int | None = None
        self._woken = asyncio.Event()

    def suspect(self, reason: str) -> None:
        """A stream broke: take the server out now and look at once."""
        self._fleet.server_down(self._link.address, reason)
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            await self._probe()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _probe(self) -> None:
        try:
            is_up = await self._ask()
        except grpc.aio.AioRpcError as error:
            is_up = False
            self._lost(error)
        reason = "" if is_up else self._server_reason()
        if (is_up, reason) != (self._is_up, self._reason):
            self._is_up, self._reason = is_up, reason
            self._tell(is_up, reason)
        await self._on_change()

    async def _ask(self) -> bool:
        control, metadata, timeout = self._link.control, self._link.metadata, self._timeout_s
        answer = await control.GetServerInfo(
            cpb.GetServerInfoRequest(), metadata=metadata, timeout=timeout
        )
        info = server_info_from_proto(answer)
        self._see_incarnation(info.incarnation)
        model = None
        if info.state == "ready":
            answer = await control.GetModelInfo(
                cpb.GetModelInfoRequest(), metadata=metadata, timeout=timeout
            )
            model = model_info_from_proto(answer)
        is_up = self._fleet.observe(self._link.address, info, model)
        if is_up:
            await self._ask_load()
            return True
        if info.state not in STREAMING_STATES:
            self._on_silent(self._link.address, self._server_reason())
        return False

    async def _ask_load(self) -> None:
        """Late is unknown, and waits no longer than a heartbeat: the next probe matters more."""
        timeout_s = min(self._heartbeat_s, self._timeout_s)
        try:
            load = await self._link.control.GetLoad(
                cpb.GetLoadRequest(), metadata=self._link.metadata, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            self._log.info("load_unknown", address=self._link.address)
        else:
            self._fleet.report_load(self._link.address, load_from_proto(load))

    def _see_incarnation(self, incarnation: int) -> None:
        """Zero tells nothing: a server that starts has no engine yet."""
        if incarnation == 0:
            return
        if self._incarnation not in (None, incarnation):
            self._fall_silent("it was restarted")
        self._incarnation = incarnation

    def _lost(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._fall_silent(f"silent for {self._timeout_s:g} s")
        else:
            self._fleet.server_down(self._link.address, error_from_rpc(error).message)

    def _fall_silent(self, reason: str) -> None:
        self._fleet.server_down(self._link.address, reason)
        self._on_silent(self._link.address, reason)

    def _server_reason(self) -> str:
        return self._fleet.server(self._link.address).reason

    def _tell(self, is_up: bool, reason: str) -> None:
        server = self._fleet.server(self._link.address)
        if is_up:
            self._log.info("server_up", server=server.label, role=server.role.value)
        else:
            self._log.warning(
                "server_down", server=server.label, role=server.role.value, reason=reason
            )
