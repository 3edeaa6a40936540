"""Rank 0's part: it drives the engine, serves the lanes and leads the members.

Life: the leader's socket is bound and the owner's lane open before the HELLO; then the engine
loads, the loop runs until it is stopped or the engine dies; members stop after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from executor.engine.factory import create_engine
from executor.engine.seam import Engine, EngineIdentity
from executor.inbox import Inbox
from executor.ipc import Context
from executor.lanes import Lanes
from executor.messages import Died
from executor.worker import Heart, Worker
from executor.world.frames import SocketBounds
from executor.world.leader import Leader
from executor.world.messages import (
    CloseLane,
    LaneClosed,
    LaneOpened,
    OpenLane,
    StopRank,
    ToOwner,
    ToRank,
)
from executor.world.orders import Orders
from protos.errors import BatonError, EngineDeadError, ErrorData, OverloadedError


class Leading:
    """`load`, `serve` and `close` run on the main thread, the rest on the status link's."""

    def __init__(
        self,
        orders: Orders,
        context: Context,
        sockets: SocketBounds,
        say: Callable[[ToOwner], bool],
    ) -> None:
        self._orders = orders
        self._say = say
        self._stopping = threading.Event()
        self._was_told = False
        self._inbox = Inbox(orders.bounds.queue_messages_max)
        self._lanes = Lanes(
            self._inbox,
            clock=time.monotonic,
            is_stopping=self._stopping.is_set,
            queue_messages_max=orders.bounds.queue_messages_max,
            message_bytes_max=orders.bounds.message_bytes_max,
            look_s=orders.bounds.heartbeat_s,
            on_closed=self._on_lane_closed,
        )
        if orders.lane is not None:
            self._lanes.open(orders.lane)
        self._leader: Leader | None = None
        if orders.num_ranks > 1:
            self._leader = Leader(
                context,
                orders.leader_endpoint,
                key=orders.key,
                num_ranks=orders.num_ranks,
                bounds=sockets,
            )
            self._leader.start()
        self._receiver: threading.Thread | None = None
        self._engine: Engine | None = None

    @property
    def member_endpoint(self) -> tuple[str, str]:
        """Where members connect, and the socket's public CURVE key."""
        return ("", "") if self._leader is None else (self._leader.endpoint, self._leader.curve_key)

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    def load(self) -> EngineIdentity:
        """Raises what the engine raises, EngineDeadError where a member does not join."""
        self._engine = create_engine(self._orders.config, self._inbox.wake)
        timeout_s = self._orders.bounds.hello_s_max
        if self._leader is not None and not self._leader.wait_joined(timeout_s):
            raise EngineDeadError(f"not every member joined rank 0 within {timeout_s:g} s")
        return self._engine.identity

    def serve(self) -> bool:
        """True where the owner stopped it. Raises what the engine raised: it is dead then."""
        assert self._engine is not None
        bounds = self._orders.bounds
        worker = Worker(
            self._engine,
            self._inbox,
            self._lanes,
            tombstones_max=bounds.tombstones_max,
            members=self._leader,
        )
        self._receiver = threading.Thread(
            target=self._lanes.receive_until_closed, name="receiver", daemon=True
        )
        self._receiver.start()
        heart = Heart(worker, self._lanes, bounds.heartbeat_s)
        heart.start()
        try:
            worker.run()
        finally:
            heart.stop()
        return self._was_told

    def say_died(self, error: ErrorData) -> None:
        """To every frontend."""
        self._lanes.say_all(Died(error))

    def stop(self) -> None:
        """From another thread than the loop's."""
        self._stopping.set()
        self._inbox.stop()

    def close(self) -> None:
        """Let the last words out; bounded, but for what the engine takes to close."""
        if self._engine is not None:
            self._engine.close()
        self._inbox.stop()  # frees a receiver that waits for room
        self._lanes.shut(has_receiver=self._receiver is not None)
        if self._leader is not None:
            self._leader.stop_members()
            self._leader.close()

    # --- the owner's commands -------------------------------------------------

    def on_command(self, message: ToRank) -> None:
        match message:
            case OpenLane():
                self._open_lane(message)
            case CloseLane():
                self._lanes.close(message.frontend_id, message.why)
            case StopRank():
                self._was_told = True
                self.stop()
            case _:
                pass

    def _on_lane_closed(self, frontend_id: int, why: str) -> None:
        self._say(LaneClosed(frontend_id, why))

    def _open_lane(self, message: OpenLane) -> None:
        frontend_id = message.spec.frontend_id
        try:
            self._say(LaneOpened(frontend_id, spec=self._lanes.open(message.spec)))
        except BatonError as error:
            self._say(LaneOpened(frontend_id, error=error.to_data()))
        except (OSError, zmq.ZMQError) as error:  # strangers may have taken all descriptors
            refusal = OverloadedError(
                f"rank 0 cannot open sockets for one more frontend: {error}", field="lanes"
            )
            self._say(LaneOpened(frontend_id, error=refusal.to_data()))
