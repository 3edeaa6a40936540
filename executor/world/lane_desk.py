"""Lanes that rank 0 was asked to open and has not told of yet: asked once, answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor.lane import LaneSpec
from executor.world.messages import LaneOpened, OpenLane, ToRank
from protos.errors import EngineDeadError, OverloadedError, ServerUnavailableError, from_data

WAITING_MAX = 256


class LaneDesk:
    """`tell` says whether rank 0 could be reached."""

    def __init__(
        self,
        tell: Callable[[ToRank], bool],
        dead: asyncio.Future[EngineDeadError],
        answer_s_max: float,
    ) -> None:
        self._tell = tell
        self._dead = dead
        self._answer_s_max = answer_s_max
        self._waiting: dict[int, asyncio.Future[LaneSpec]] = {}

    async def open(self, spec: LaneSpec) -> LaneSpec:
        """Raises what `World.open_lane` raises."""
        frontend_id = spec.frontend_id
        if self._dead.done():
            raise self._dead.result()
        if frontend_id in self._waiting or len(self._waiting) >= WAITING_MAX:
            raise OverloadedError(
                f"{len(self._waiting)} lanes are being opened, {frontend_id} or {WAITING_MAX}",
                field="lanes",
                limit=WAITING_MAX,
            )
        future = asyncio.get_running_loop().create_future()
        self._waiting[frontend_id] = future
        try:
            if self._tell(OpenLane(spec)):
                await asyncio.wait(
                    (future, self._dead),
                    timeout=self._answer_s_max,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            del self._waiting[frontend_id]
        return self._result(frontend_id, future)

    def on_opened(self, message: LaneOpened) -> None:
        future = self._waiting.get(message.frontend_id)
        if future is None or future.done():
            return
        if message.spec is not None:
            future.set_result(message.spec)
        elif message.error is not None:
            future.set_exception(from_data(message.error))

    def _result(self, frontend_id: int, future: asyncio.Future[LaneSpec]) -> LaneSpec:
        if future.done():
            return future.result()
        if self._dead.done():
            raise self._dead.result()
        raise ServerUnavailableError(
            f"rank 0 did not open lane {frontend_id} within {self._answer_s_max:g} s"
        )
