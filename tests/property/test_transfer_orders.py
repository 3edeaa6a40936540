"""F44: abort, finish, received, sent, expired, peer down, in every order.

A source and a target machine talk over two lossless ordered channels whose
delivery the test interleaves at random with the operations' ends and with
whatever may go wrong. However it goes, each side ends exactly once, and at that
instant nothing of its own still touches the blocks.
"""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import source_session as source
from kv_transfer import target_session as target
from protos.errors import RequestCancelledError

CANCELLED = RequestCancelledError("cancelled").to_data()
GOOD = 5
STEPS = (
    "to_source",
    "to_target",
    "move",
    "move_damaged",
    "abort",
    "lease_over",
    "peer_lost",
    "stall",
    "silence",
)


class World:
    """Blocks' holders by name, as the engines would keep them."""

    def __init__(self, num_segments: int) -> None:
        pieces = [(2 * i, 2) for i in range(num_segments)]
        self.source = source.SourceSession("s", pieces)
        self.target = target.TargetSession("t", 2 * num_segments, 10, 2)
        self.to_source: deque[source.SourceEvent] = deque([source.Granted(2)])
        self.to_target: deque[target.TargetEvent] = deque()
        self.on_wire: dict[int, int] = {}
        """Segments whose send runs, by number, with the checksum announced."""
        self.posted: dict[int, bool] = {}
        self.lease_ends: list[str] = []
        self.transfer_ends = 0
        self.pull_ends: list[target.TargetEffect] = []
        self.is_cut = False
        self.apply_target(self.target.start())

    def tell_source(self, event: source.SourceEvent) -> None:
        if self.source.state is not source.SourceState.ENDED:
            self.apply_source(self.source.handle(event))

    def tell_target(self, event: target.TargetEvent) -> None:
        if self.target.state is not target.TargetState.ENDED:
            self.apply_target(self.target.handle(event))

    def apply_source(self, effects: source.SourceEffects) -> None:
        for effect in effects:
            match effect:
                case source.SendSegment(segment, first, count):
                    self.on_wire[segment] = GOOD
                    announced = target.Announced(segment, first, count, 10 * count, GOOD)
                    self.to_target.append(announced)
                case source.SayStopped(reason, message):
                    self.to_target.append(target.SourceStopped(reason, message))
                case source.EndLease(cause):
                    if not self.lease_ends:
                        self.lease_ends.append(cause)
                case source.TransferOver():
                    assert not self.on_wire, "the source let go while a send was reading"
                    self.transfer_ends += 1

    def apply_target(self, effects: target.TargetEffects) -> None:
        for effect in effects:
            match effect:
                case target.PostReceive(segment):
                    self.posted[segment] = True
                case target.GrantCredit(segments):
                    self.to_source.append(source.Granted(segments))
                case target.AskResend(segment):
                    self.to_source.append(source.ResendAsked(segment))
                case target.SendAck():
                    self.to_source.append(source.Acked())
                case target.SendAbort():
                    self.to_source.append(source.AbortAsked())
                case target.ClosePeer():
                    self.is_cut = True
                case target.Done() | target.Failed():
                    assert not self.posted, "the target let go while a receive could still land"
                    self.pull_ends.append(effect)

    def move(self, checksum: int) -> None:
        """One segment whose receive is posted crosses: both operations end."""
        for segment in self.posted:
            if segment in self.on_wire:
                del self.posted[segment], self.on_wire[segment]
                self.tell_target(target.Landed(segment, checksum))
                self.tell_source(source.SegmentLeft())
                return

    def cut(self) -> None:
        """The link is gone: operations end by errors, then each side hears PeerLost."""
        self.to_source.clear()
        self.to_target.clear()
        for segment in list(self.posted):
            del self.posted[segment]
            self.tell_target(target.Landed(segment, error="the link is down"))
        self.tell_target(target.PeerLost("cut"))
        for segment in list(self.on_wire):
            del self.on_wire[segment]
            self.tell_source(source.SegmentLeft("the link is down"))
        self.tell_source(source.PeerLost("cut"))
        self.to_source.clear()
        self.to_target.clear()
        self.is_cut = False

    def step(self, name: str) -> None:
        if not self.deliver(name):
            self.disturb(name)
        if self.is_cut:
            self.cut()

    def deliver(self, name: str) -> bool:
        match name:
            case "to_source" if self.to_source:
                self.tell_source(self.to_source.popleft())
            case "to_target" if self.to_target:
                self.tell_target(self.to_target.popleft())
            case "move":
                self.move(GOOD)
            case "move_damaged":
                self.move(GOOD + 1)
            case _:
                return False
        return True

    def disturb(self, name: str) -> None:
        match name:
            case "abort":
                self.tell_target(target.AbortAsked(CANCELLED))
            case "lease_over" if not self.lease_ends:
                self.lease_ends.append("expired")
                self.tell_source(source.LeaseOver("expired"))
            case "peer_lost":
                self.cut()
            case "stall":
                self.tell_target(target.Stalled(False, 1.0))
            case "silence":
                self.tell_target(target.Stalled(True, 1.0))

    def settle(self) -> None:
        """Liveness: with no more faults all ends, by an expiry and a cut at the very latest."""
        for _ in range(200):
            for name in ("to_source", "to_target", "move"):
                self.step(name)
        self.step("lease_over")
        for _ in range(50):
            for name in ("to_source", "to_target", "move"):
                self.step(name)
        self.step("stall")
        self.step("stall")
        self.cut()


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 5), st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_order_ends_each_side_exactly_once(num_segments: int, steps: list[str]) -> None:
    world = World(num_segments)
    for name in steps:
        world.step(name)
    world.settle()
    assert len(world.pull_ends) == 1
    assert world.transfer_ends == 1
    assert len(world.lease_ends) == 1
    assert not world.posted
    assert not world.on_wire


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5), st.lists(st.sampled_from(["to_source", "to_target", "move"])))
def test_without_faults_every_interleaving_succeeds(num_segments: int, steps: list[str]) -> None:
    world = World(num_segments)
    for name in steps:
        world.step(name)
    for _ in range(100):
        for name in ("to_source", "to_target", "move"):
            world.step(name)
    assert world.pull_ends == [target.Done()]
    assert world.lease_ends == ["acked"]
    assert world.transfer_ends == 1
