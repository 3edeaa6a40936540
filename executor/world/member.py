"""A rank that does not lead: joins rank 0, opens UCX, beats, and executes collective calls.

Life: welcomed by the owner (which tells where rank 0 listens), joined, ready, executing calls
in their order on the main thread, stopped by rank 0. Both of its links beat from threads of
their own, so a long call is no silence.
"""

from __future__ import annotations

import queue
import time

from executor.engine.control import Method, RankFacts
from executor.engine.member import MemberControl
from executor.ipc import Context
from executor.packing import body_bytes_max
from executor.world.collective import (
    LINK,
    Answer,
    Join,
    JoinAck,
    MemberBeat,
    MemberCall,
    MemberStop,
    MemberSubmit,
    ToMember,
    answer,
    packed_answer,
)
from executor.world.frames import RankDealer, SocketBounds, open_dealer
from executor.world.messages import HelloAck
from executor.world.orders import Orders
from executor.world.outer import not_leader
from executor.world.rank_link import RankLink
from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.transport import Transport
from protos.errors import EngineDeadError

LINGER_MS = 1000
CALLS_MAX = 64


class Member:
    """`load` and `serve` run on the main thread; `stop` may come from another one."""

    def __init__(
        self, orders: Orders, context: Context, sockets: SocketBounds, ack: HelloAck
    ) -> None:
        bounds = orders.bounds
        self._orders = orders
        self._bytes_max = body_bytes_max(bounds.message_bytes_max)
        self._calls: queue.Queue[ToMember] = queue.Queue(CALLS_MAX)
        socket = open_dealer(context, ack.leader_endpoint, ack.leader_curve_key, sockets, LINGER_MS)
        self._link: RankLink[ToMember] = RankLink(
            "leader-link",
            RankDealer(socket, LINK, orders.key, orders.rank, ToMember),
            beat=MemberBeat(),
            period_s=bounds.heartbeat_s,
            messages_max=bounds.queue_messages_max,
            on_message=self._on_message,
        )
        self._link.start()
        self._transport: Transport | None = None
        self._control: MemberControl | None = None
        self._methods: dict[str, Method] = {}
        self.is_loaded = False
        self._was_stopped = False

    def join(self) -> None:
        """Raises EngineDeadError where rank 0 does not answer."""
        timeout_s = self._orders.bounds.hello_s_max
        if self._link.ask(Join(), JoinAck, timeout_s) is None:
            raise EngineDeadError(f"rank 0 did not answer within {timeout_s:g} s")

    def load(self) -> None:
        config = self._orders.config
        transfer = config.transfer
        if transfer.transport == "ucx":
            settings = TransportSettings(tls=transfer.ucx_tls, net_devices=transfer.ucx_net_devices)
            self._transport = create_transport("ucx", settings)
        self._control = MemberControl(RankFacts(self._orders.rank, config.engine, config.device))
        self._methods = dict(self._control.methods())
        if config.scripted.load_ms and config.engine == "scripted":
            time.sleep(config.scripted.load_ms / 1000)
        self.is_loaded = True

    def serve(self) -> bool:
        """True where rank 0 says stop, False after `stop`."""
        while True:
            try:
                call = self._calls.get(timeout=self._control.wait_s() if self._control else None)
            except queue.Empty:
                call = None
            if self._control is not None:
                self._control.turn()
            match call:
                case None:
                    continue
                case MemberCall():
                    told = answer(call.call_id, self._methods, call)
                    self._link.say(packed_answer(call, told, self._bytes_max))
                case MemberSubmit():
                    error = not_leader(self._orders.rank, "takes no requests")
                    self._link.say(Answer(call.call_id, error=error.to_data()))
                case _:
                    return not self._was_stopped

    def stop(self) -> None:
        """From another thread, unasked by rank 0."""
        self._was_stopped = True
        self._calls.put(MemberStop())

    def close(self) -> None:
        """Bounded."""
        if self._control is not None:
            self._control.close()
        if self._transport is not None:
            self._transport.close()
        self._link.close()

    def _on_message(self, message: ToMember) -> None:
        """On the link's thread. The leader has fewer calls under way than fit here."""
        if not isinstance(message, JoinAck):
            self._calls.put(message)
