"""Abort, finish, received, sent, expired, in every order: each block is freed exactly once.

`test_transfer_orders.py` does this to the two ends of one pull, at random. Here
the engine is taken through *all* orders, on either side, with its blocks' holders
watched from outside: a holder that let go never comes back, and a block that has
no holder any more is not let go of again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from executor.engine.seam import EngineOutput
from kv_transfer.events import (
    LeaseEnded,
    PullFailed,
    PullFinished,
    TransferEnded,
    TransferStarted,
)
from protos.errors import KvTransferError
from protos.messages import DisaggRequestId, KvStats, RequestType
from tests.support.engine_doubles import HandEngine
from tests.support.engine_requests import request_for

PROMPT = [3] * 10
DEADLINE_S = 50.0
HANDOFF = DisaggRequestId(1, 1, 0)
SENDING = ("abort", "finish", "started", "sent", "lease_over", "expired")
RECEIVING = ("abort", "finish", "received", "expired")


class Watched:
    """One request on one engine, and the blocks' holders as an onlooker sees them."""

    def __init__(self, request_type: RequestType, *, pull_fails: bool = False) -> None:
        self.engine = HandEngine(num_blocks=8)
        self.core, self.mover = self.engine.core, self.engine.mover
        self.pull_fails = pull_fails
        self.ends: list[EngineOutput] = []
        self.sent_from: tuple[int, ...] = ()
        self.held: dict[int, set[str]] = {}
        self.gone: set[tuple[int, str]] = set()
        self.num_freed: dict[int, int] = {}
        self.core.submit(request_for(1, PROMPT, request_type, max_tokens=3, deadline_s=DEADLINE_S))
        self.step()

    def step(self) -> None:
        outputs = self.core.step()
        self.ends += [o for o in outputs if o.finish is not None or o.error is not None]
        self.look()

    def look(self) -> None:
        self.core.check()
        now = {block: set(names) for block, names in self.core.audit().holders.items()}
        for block in {*self.held, *now}:
            before, after = self.held.get(block, set()), now.get(block, set())
            self.gone |= {(block, name) for name in before - after}
            back = {name for name in after - before if (block, name) in self.gone}
            assert not back, f"block {block} is held again by {back}, who had let go"
            if before and not after:
                self.num_freed[block] = self.num_freed.get(block, 0) + 1
        self.held = now
        touched = [block for pull in self.mover.pulls.values() for block in pull.block_ids]
        for block in [*touched, *self.sent_from]:
            assert block in now, f"block {block} is free while bytes still cross"

    def happens(self, name: str) -> None:
        match name:
            case "abort":
                self.core.abort(1)
            case "finish":
                self.rest()
            case "expired":
                self.engine.clock.now_s += 2 * DEADLINE_S
            case "started":  # only an offer that stands can be pulled
                if HANDOFF in self.mover.offers:
                    self.sent_from = self.mover.offers[HANDOFF].block_ids
                self.mover.put(TransferStarted(HANDOFF))
            case "sent":
                self.sent_from = ()
                self.mover.put(TransferEnded(HANDOFF))
            case "lease_over":
                self.mover.offers.pop(HANDOFF, None)
                self.mover.put(LeaseEnded(HANDOFF, "expired"))
            case "received":
                self.end_pull()
        self.step()

    def end_pull(self) -> None:
        self.mover.pulls.pop(HANDOFF, None)
        if self.pull_fails:
            self.mover.put(PullFailed(HANDOFF, KvTransferError("by hand").to_data()))
        else:
            self.mover.put(PullFinished(HANDOFF, KvStats(transferred_tokens=len(PROMPT))))

    def rest(self) -> None:
        """Until the engine has nothing to do; F16: waiting for the data plane is no work."""
        for _ in range(50):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("the engine never comes to rest")

    def settle(self) -> None:
        """The data plane ends what it still holds, and nothing is left to free."""
        self.rest()
        if self.mover.pulls:
            self.happens("received")
        if self.sent_from:
            self.happens("sent")
        if self.mover.offers:
            self.happens("lease_over")
        self.rest()
        assert len(self.ends) == 1
        assert self.held == {}
        assert set(self.num_freed.values()) == {1}
        states = self.core.audit().blocks_by_state
        assert states["free"] + states["cached"] == 8


def orders(names: Iterable[str]) -> list[tuple[str, ...]]:
    """All in which a send's end does not come before its start; shorter ones too."""
    found = []
    for length in range(len(tuple(names)) + 1):
        for order in itertools.permutations(names, length):
            sent, started = "sent" in order, "started" in order
            if not sent or (started and order.index("started") < order.index("sent")):
                found.append(order)
    return found


def test_the_sending_side_in_every_order() -> None:
    """F44: an abort after the finish, or with a send pending, freed blocks twice or never."""
    for order in orders(SENDING):
        world = Watched(RequestType.CONTEXT_ONLY)
        for name in order:
            world.happens(name)
        world.settle()


@pytest.mark.parametrize("pull_fails", [False, True])
def test_the_receiving_side_in_every_order(pull_fails: bool) -> None:
    """F44: an abort with a receive pending handed the blocks on while they were written."""
    for order in orders(RECEIVING):
        world = Watched(RequestType.GENERATION_ONLY, pull_fails=pull_fails)
        for name in order:
            world.happens(name)
        world.settle()
