"""What runs in every rank, whoever started it: HELLO, load, serve, and an end that is told.

The launcher's entry hands over the orders. From then on the owner hears of this rank by the
status socket: who it is before anything is loaded, READY after, its last words if it dies,
DONE when it was told to stop and everything is closed. Exit status: 0 stopped, 1 the engine
died or did not load, 3 the owner vanished.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from types import FrameType

from executor.engine.seam import EngineIdentity
from executor.ipc import new_context
from executor.last_words import last_words
from executor.parent import EXIT_PARENT_GONE
from executor.world.frames import RankDealer, SocketBounds, open_dealer
from executor.world.leading import Leading
from executor.world.member import Member
from executor.world.messages import (
    STATUS_LINK,
    DiedAck,
    HelloAck,
    Leave,
    RankBeat,
    RankDied,
    RankDone,
    RankHello,
    RankJoined,
    RankReady,
    ReadyAck,
    ToRank,
)
from executor.world.orders import Orders, ProcessName
from executor.world.owner_watch import OwnerWatch
from executor.world.rank_link import RankLink
from protos.errors import ConfigError

EXIT_DIED = 1
LINGER_MS = 1000
LAST_WORDS_S_MAX = 2.0


def run_rank(orders: Orders, *, keeps_signals: bool = False) -> int:
    """The exit status. Call it once per process; whatever thread still waits then ends with it.

    `keeps_signals`: the caller has handlers of its own.
    """
    prefix = "" if orders.num_ranks == 1 else f"rank {orders.rank} "
    logging.basicConfig(level=logging.INFO, format=f"{prefix}%(levelname)s %(name)s: %(message)s")
    rank = Rank(orders)
    if not keeps_signals and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is the owner's to judge
        signal.signal(signal.SIGTERM, rank.on_sigterm)
    return rank.run()


class Rank:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        bounds = orders.bounds
        self._owner = OwnerWatch(orders.owner, bounds.owner_silence_s_max)
        self._context = new_context()
        self._sockets = SocketBounds(bounds.queue_messages_max, bounds.message_bytes_max)
        socket = open_dealer(
            self._context,
            orders.status_endpoint,
            orders.status_curve_key,
            self._sockets,
            LINGER_MS,
        )
        self._link: RankLink[ToRank] = RankLink(
            "status-link",
            RankDealer(socket, STATUS_LINK, orders.key, orders.rank, ToRank),
            beat=RankBeat(),
            period_s=bounds.heartbeat_s,
            messages_max=bounds.queue_messages_max,
            on_message=self._on_message,
            on_beat=self._owner.look,
        )
        self._part: Leading | Member | None = None
        self._was_asked_to_end = False

    def run(self) -> int:
        status, was_told = EXIT_DIED, False
        try:
            self._part = self._start()
            was_told = self._part.serve()
            status = 0
        except Exception as error:
            self._say_died(error)
        self._close(was_told=was_told)
        return status

    def _start(self) -> Leading | Member:
        """HELLO before anything is loaded, READY after."""
        if self._orders.rank == 0:
            leading = Leading(self._orders, self._context, self._sockets, self._link.say)
            self._part = leading
            self._link.start()
            self._say_hello(*leading.member_endpoint)
            self._say_ready(leading.load())
            return leading
        self._link.start()
        ack = self._say_hello()
        member = Member(self._orders, self._context, self._sockets, ack)
        self._part = member
        member.join()
        self._link.say(RankJoined())
        member.load()
        self._say_ready()
        return member

    def _say_hello(self, leader_endpoint: str = "", leader_curve_key: str = "") -> HelloAck:
        hello = RankHello(ProcessName.own(), leader_endpoint, leader_curve_key)
        ack = self._link.ask(hello, HelloAck, self._orders.bounds.hello_s_max)
        if ack is None:
            os._exit(EXIT_PARENT_GONE)
        return ack

    def _say_ready(self, identity: EngineIdentity | None = None) -> None:
        if self._was_asked_to_end:
            os._exit(0)  # while it loaded
        self._link.ask(RankReady(identity), ReadyAck, self._orders.bounds.hello_s_max)

    # --- from the owner, on the link's thread ---------------------------------

    def _on_message(self, message: ToRank) -> None:
        self._owner.on_heard()
        if isinstance(self._part, Leading):
            self._part.on_command(message)

    def on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        part = self._part
        self._was_asked_to_end = True
        if part is None or not part.is_loaded:
            os._exit(0)  # nothing of ours is worth closing before the engine stands
        # Not here: the interrupted main thread may hold a lock that this needs.
        threading.Thread(target=part.stop, daemon=True).start()

    # --- the end --------------------------------------------------------------

    def _say_died(self, error: Exception) -> None:
        """Before anything is closed: closing a broken engine may take its time."""
        if isinstance(error, ConfigError):
            print(f"ERROR {error.message}", file=sys.stderr)  # noqa: T201 - the user's to mend
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        data = last_words(error)
        if isinstance(self._part, Leading):
            self._part.say_died(data)
        self._link.ask(RankDied(data), DiedAck, LAST_WORDS_S_MAX)

    def _close(self, *, was_told: bool) -> None:
        """Bounded. A rank that was told to stop ends only when all are done: under MPI the
        first exit is the end of every other rank."""
        if self._part is not None:
            self._part.close()
        if was_told:
            self._link.say(RankDone())
            self._link.wait_for(Leave, self._orders.bounds.leave_s_max)
        self._owner.disarm()
        self._link.close()
