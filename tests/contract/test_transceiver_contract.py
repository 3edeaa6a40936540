"""What the engine may rely on, over every transport: one pair of transceivers each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.events import (
    LeaseEnded,
    PullFailed,
    PullFinished,
    TransferEnded,
    TransferLimits,
    TransferStarted,
)
from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.faulty import FaultRule, FaultyTransport
from kv_transfer.inproc import InprocNetwork
from kv_transfer.transport import Transport
from protos.errors import ConfigError, InternalError
from tests.support.kv_pair import LAYOUT, Node, key, wait_until

TLS = {"ucx-tcp": "tcp,self", "ucx-shm": "tcp,self,posix,cma"}


@pytest.fixture(params=["inproc", "ucx-tcp", "ucx-shm"])
def factory(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    settings = TransportSettings(network=InprocNetwork(), tls=TLS.get(request.param, ""))
    name = "inproc" if request.param == "inproc" else "ucx"
    return lambda: create_transport(name, settings)


@pytest.fixture
def nodes(factory: Callable[[], Transport]) -> Iterator[tuple[Node, Node]]:
    source, target = Node(factory), Node(factory)
    source.fill(1)
    yield source, target
    target.close()
    source.close()


class FaultyPair:
    """A source and a target on inproc; the rules break what each of them sends."""

    def __init__(self) -> None:
        network = InprocNetwork()
        settings = TransportSettings(network=network)
        self.rules: dict[str, list[FaultRule]] = {"source": [], "target": []}
        self.transports: dict[str, FaultyTransport] = {}

        def factory_of(name: str) -> Callable[[], Transport]:
            def make() -> Transport:
                made = FaultyTransport(create_transport("inproc", settings))
                self.transports[name] = made
                return made

            return make

        self.source = Node(factory_of("source"))
        self.target = Node(factory_of("target"))
        self.source.fill(2)

    def break_(self, name: str, *rules: FaultRule) -> None:
        self.transports[name].rules.extend(rules)


@pytest.fixture
def faulty() -> Iterator[FaultyPair]:
    made = FaultyPair()
    yield made
    made.target.close()
    made.source.close()


def is_idle(node: Node) -> bool:
    audit = node.transceiver.audit()
    return audit.leases == audit.transfers == audit.pulls == audit.operations == 0


def test_blocks_arrive_where_they_belong(nodes: tuple[Node, Node]) -> None:
    source, target = nodes
    offered = (3, 4, 5, 20, 9, 8, 40, 41, 42, 43, 44, 60)
    filled = (50, 1, 2, 3, 30, 31, 7)
    positions = (11, 0, 1, 2, 6, 4, 9)
    offer = source.offer(1, offered)
    target.pull(offer, source, filled, positions=positions)
    finished = target.wait_for(PullFinished, 1)
    assert isinstance(finished, PullFinished)
    assert finished.stats.transferred_bytes == len(filled) * LAYOUT.block_bytes
    for block, position in zip(filled, positions, strict=True):
        assert (target.blocks[block] == source.blocks[offered[position]]).all()
    untouched = [block for block in range(64) if block not in filled]
    assert not target.blocks[untouched].any()
    source.wait_for(TransferEnded, 1)
    assert source.events == [
        TransferStarted(key(1)),
        LeaseEnded(key(1), "acked"),
        TransferEnded(key(1)),
    ]
    assert target.events == [finished]
    assert finished.stats.transport == target.transceiver.wires == source.transceiver.wires
    wait_until(lambda: is_idle(source) and is_idle(target))


def test_a_pull_of_nothing_only_acknowledges(nodes: tuple[Node, Node]) -> None:
    source, target = nodes
    offer = source.offer(1, (1, 2, 3))
    target.pull(offer, source, ())
    finished = target.wait_for(PullFinished, 1)
    assert isinstance(finished, PullFinished)
    assert finished.stats.transferred_tokens == 0
    assert source.lease_cause(1) == "acked"


def test_32_first_contacts_at_once(factory: Callable[[], Transport]) -> None:
    """F45: two peers that start at once, both ways, crashed or hung elsewhere."""
    source, target = Node(factory), Node(factory)
    source.fill(1)
    for i in range(16):
        there = source.offer(i, (i, i + 1))
        target.pull(there, source, (2 * i, 2 * i + 1))
        back = target.offer(100 + i, (32 + i,))
        source.pull(back, target, (40 + i,))
    for i in range(16):
        target.wait_for(PullFinished, i)
        source.wait_for(PullFinished, 100 + i)
    assert (target.blocks[4:6] == source.blocks[2:4]).all()
    wait_until(lambda: is_idle(source) and is_idle(target))
    source.close()
    target.close()


def test_abort_one_of_32_leaves_the_others_alone(nodes: tuple[Node, Node]) -> None:
    source, target = nodes
    offers = [source.offer(i, tuple(range(i, i + 30))) for i in range(32)]
    for i, offer in enumerate(offers):
        target.pull(offer, source, (2 * i, 2 * i + 1), positions=(0, 29))
    target.transceiver.abort_pull(key(31))
    target.wait(lambda events: len(events) == 32)
    ended = [event for event in target.events if event.disagg_request_id == key(31)]
    assert len(ended) == 1
    if isinstance(ended[0], PullFailed):
        assert ended[0].error.kind == "RequestCancelledError"
    assert sum(isinstance(event, PullFinished) for event in target.events) >= 31
    wait_until(lambda: is_idle(source) and is_idle(target))
    assert target.transceiver.audit().counters.get("peers_lost", 0) == 0


def test_a_refused_pull_says_why(nodes: tuple[Node, Node]) -> None:
    """F45: wrong token, incarnation, block count: refused by name, at once."""
    source, target = nodes
    offer = source.offer(1, (1, 2))
    target.pull(offer, source, (1, 2), pull_token=b"guess")
    target.pull(source.offer(2, (1, 2)), source, (1, 2), num_source_blocks=3)
    for counter, reason in ((1, "token"), (2, "blocks")):
        failed = target.wait_for(PullFailed, counter)
        assert isinstance(failed, PullFailed)
        assert f"({reason})" in failed.error.message
        assert failed.error.kind == "KvTransferError"
    unknown = target.pull_of(offer, source, (1,), disagg_request_id=key(3))
    target.transceiver.pull(unknown)
    failed = target.wait_for(PullFailed, 3)
    assert isinstance(failed, PullFailed)
    assert "(unknown)" in failed.error.message
    assert source.transceiver.audit().leases == 2


def test_another_incarnation_is_refused(nodes: tuple[Node, Node]) -> None:
    """F29: a restarted source must not serve what its former life offered."""
    source, target = nodes
    offer = source.offer(1, (1, 2))
    target.pull(offer, source, (1, 2), source_incarnation=source.incarnation + 500)
    failed = target.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert "(incarnation)" in failed.error.message
    assert source.transceiver.audit().counters == {"pulls_refused_incarnation": 1}


def test_another_layout_is_refused_by_field(nodes: tuple[Node, Node]) -> None:
    source, target = nodes
    offer = source.offer(1, (1, 2))
    changed = type(LAYOUT)(
        dtype="bfloat16",
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        tokens_per_block=16,
        model_fingerprint="test",
    )
    target.pull(offer, source, (1, 2), source_layout=changed)
    failed = target.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert failed.error.field == "layout.dtype"


def test_release_before_its_offer_refuses_it(nodes: tuple[Node, Node]) -> None:
    source, _ = nodes
    assert not source.transceiver.release(key(1), b"token-1")
    source.offer(1, (1, 2))
    assert source.lease_cause(1) == "released"
    assert source.transceiver.audit().leases == 0


def test_release_needs_the_token_and_answers_at_once(nodes: tuple[Node, Node]) -> None:
    source, _ = nodes
    source.offer(1, (1, 2))
    assert not source.transceiver.release(key(1), b"wrong")
    assert source.transceiver.renew(key(1), b"token-1")
    assert source.transceiver.release(key(1), b"token-1")
    assert not source.transceiver.release(key(1), b"token-1")
    assert source.lease_cause(1) == "released"


def test_leases_expire_by_their_own_time_without_traffic(nodes: tuple[Node, Node]) -> None:
    """F1, F30: expiry order is not arrival order, and needs no new request."""
    source, _ = nodes
    source.offer(1, (1,), lease_s=30.0)
    source.offer(2, (2,), lease_s=0.1)
    source.offer(3, (3,), lease_s=30.0, deadline_s=0.2)
    assert source.lease_cause(2, 2.0) == "expired"
    assert source.lease_cause(3, 2.0) == "expired"
    assert source.transceiver.audit().leases == 1


def test_close_ends_everything_once(factory: Callable[[], Transport]) -> None:
    source, target = Node(factory), Node(factory)
    source.offer(1, (1, 2))
    source.close()
    source.close()
    target.close()
    assert source.events == [LeaseEnded(key(1), "closed")]


def test_close_in_mid_transfer_ends_each_side_once(factory: Callable[[], Transport]) -> None:
    """Shutdown is bounded and tells every end, with a receive and sends still pending."""
    lost = FaultRule("drop", on="segment", skip=1)
    source = Node(lambda: FaultyTransport(factory(), [lost]))
    target = Node(factory)
    target.pull(source.offer(1, tuple(range(20))), source, tuple(range(20)))
    wait_until(lambda: target.transceiver.audit().operations > 0)
    start = time.monotonic()
    target.close()
    source.close()
    assert time.monotonic() - start < 3.0
    (failed,) = target.events
    assert isinstance(failed, PullFailed)
    assert [type(event) for event in source.events] == [TransferStarted, LeaseEnded, TransferEnded]
    assert is_idle(target)
    assert is_idle(source)


def test_one_lease_serves_one_pull_at_a_time(factory: Callable[[], Transport]) -> None:
    """F31: two attempts that share the blocks' lease must not be mixed up."""
    slow = FaultRule("delay", on="segment", delay_polls=20)
    source = Node(lambda: FaultyTransport(factory(), [slow]))
    first, second = Node(factory), Node(factory)
    offer = source.offer(1, (1, 2))
    first.pull(offer, source, (1, 2))
    wait_until(lambda: source.transceiver.audit().transfers == 1)
    second.pull(offer, source, (1, 2))
    failed = second.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert "(busy)" in failed.error.message
    first.wait_for(PullFinished, 1)
    assert source.lease_cause(1) == "acked"
    for node in (first, second, source):
        node.close()


def test_a_busy_pair_sleeps_when_done(nodes: tuple[Node, Node]) -> None:
    """F16: after traffic both threads sleep; the process burns nothing."""
    source, target = nodes
    target.pull(source.offer(1, (1, 2)), source, (1, 2))
    source.lease_cause(1)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_lost_ack_ends_by_expiry(faulty: FaultyPair) -> None:
    """F23: one lost ack must not pin the blocks for good."""
    faulty.break_("target", FaultRule("drop", frame_tag="ack"))
    offer = faulty.source.offer(1, (1, 2), lease_s=0.3)
    faulty.target.pull(offer, faulty.source, (1, 2))
    faulty.target.wait_for(PullFinished, 1)
    assert faulty.source.lease_cause(1, 3.0) == "expired"
    faulty.source.wait_for(TransferEnded, 1)
    wait_until(lambda: is_idle(faulty.source))


@pytest.mark.parametrize("fault", ["drop", "delay", "duplicate", "reorder"])
@pytest.mark.parametrize("tag", ["pull", "announce", "credit", "ack"])
def test_each_control_frame_broken_once(faulty: FaultyPair, tag: str, fault: str) -> None:
    """F23: the pull ends by one event, the blocks' holders all let go, nobody crashes."""
    side = "source" if tag == "announce" else "target"
    faulty.break_(side, FaultRule(fault, frame_tag=tag, times=1))  # type: ignore[arg-type]
    offer = faulty.source.offer(1, tuple(range(20)), lease_s=0.5)
    faulty.target.pull(offer, faulty.source, tuple(range(20, 40)))
    faulty.target.wait(lambda events: len(events) == 1, 5.0)
    wait_until(lambda: is_idle(faulty.source) and is_idle(faulty.target), 5.0)
    assert len(faulty.target.take()) == 0
    faulty.source.take()
    leases = [event for event in faulty.source.events if isinstance(event, LeaseEnded)]
    assert len(leases) == 1
    starts = sum(isinstance(event, TransferStarted) for event in faulty.source.events)
    ends = sum(isinstance(event, TransferEnded) for event in faulty.source.events)
    assert starts == ends
    if isinstance(faulty.target.events[0], PullFinished):
        assert (faulty.target.blocks[20:40] == faulty.source.blocks[:20]).all()


def test_damaged_segment_is_fetched_again_once(faulty: FaultyPair) -> None:
    """F36: what arrived is verified, never trusted."""
    faulty.break_("source", FaultRule("corrupt", on="segment", skip=1, times=1))
    offer = faulty.source.offer(1, tuple(range(20)))
    faulty.target.pull(offer, faulty.source, tuple(range(20, 40)))
    faulty.target.wait_for(PullFinished, 1)
    assert (faulty.target.blocks[20:40] == faulty.source.blocks[:20]).all()
    assert faulty.source.lease_cause(1) == "acked"


def test_segment_damaged_twice_fails_the_pull(faulty: FaultyPair) -> None:
    faulty.break_("source", FaultRule("corrupt", on="segment"))
    offer = faulty.source.offer(1, (1, 2))
    faulty.target.pull(offer, faulty.source, (1, 2))
    failed = faulty.target.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert "checksum" in failed.error.message
    assert faulty.source.lease_cause(1) == "aborted"
    wait_until(lambda: is_idle(faulty.source) and is_idle(faulty.target))


def test_a_half_open_peer_is_given_up_within_the_bound(faulty: FaultyPair) -> None:
    """F4, F45: a peer that accepts and never answers again. The pair works afterwards."""
    faulty.break_("source", FaultRule("stall", frame_tag="announce", skip=1, times=1))
    offer = faulty.source.offer(1, tuple(range(20)))
    start = time.monotonic()
    faulty.target.pull(offer, faulty.source, tuple(range(20, 40)))
    failed = faulty.target.wait_for(PullFailed, 1)
    assert time.monotonic() - start < 3.0
    assert isinstance(failed, PullFailed)
    assert "silent" in failed.error.message
    faulty.source.wait_for(TransferEnded, 1)
    again = faulty.source.offer(2, (1, 2))
    faulty.target.pull(again, faulty.source, (1, 2))
    faulty.target.wait_for(PullFinished, 2)


def test_a_pull_ends_by_its_deadline(faulty: FaultyPair) -> None:
    """Invariant 7, also while the peer is alive and answers pings."""
    faulty.break_("source", FaultRule("drop", frame_tag="announce"))
    offer = faulty.source.offer(1, (1, 2))
    faulty.target.pull(offer, faulty.source, (1, 2), deadline_s=0.3)
    failed = faulty.target.wait_for(PullFailed, 1, 2.0)
    assert isinstance(failed, PullFailed)
    assert failed.error.kind == "DeadlineExceededError"
    assert faulty.source.lease_cause(1) == "aborted"


def test_a_live_peer_that_does_not_move_is_a_stall(faulty: FaultyPair) -> None:
    """Only this pull ends; the link stays, and serves the next one."""
    faulty.break_("source", FaultRule("drop", frame_tag="announce", times=1))
    offer = faulty.source.offer(1, (1, 2))
    faulty.target.pull(offer, faulty.source, (1, 2))
    failed = faulty.target.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert "no progress" in failed.error.message
    faulty.target.pull(faulty.source.offer(2, (3, 4)), faulty.source, (3, 4))
    faulty.target.wait_for(PullFinished, 2)
    assert "peers_lost" not in faulty.target.transceiver.audit().counters


def test_a_lease_lives_while_its_transfer_moves(faulty: FaultyPair) -> None:
    """F14: a transfer longer than the lease is no reason to end it."""
    faulty.break_("source", FaultRule("delay", on="segment", delay_polls=40))
    offer = faulty.source.offer(1, tuple(range(40)), lease_s=0.9)
    start = time.monotonic()
    faulty.target.pull(offer, faulty.source, tuple(range(40)))
    faulty.target.wait_for(PullFinished, 1)
    assert time.monotonic() - start > 0.9, "the transfer was too fast to show anything"
    assert faulty.source.lease_cause(1) == "acked"


def test_release_during_a_transfer_stops_it(faulty: FaultyPair) -> None:
    """The lease ends at once; the blocks stay held until the running sends have ended."""
    faulty.break_("source", FaultRule("delay", on="segment", delay_polls=20))
    offer = faulty.source.offer(1, tuple(range(40)))
    faulty.target.pull(offer, faulty.source, tuple(range(40)))
    wait_until(lambda: faulty.source.transceiver.audit().operations > 0)
    assert faulty.source.transceiver.release(key(1), offer.pull_token)
    assert faulty.source.lease_cause(1) == "released"
    failed = faulty.target.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert "released" in failed.error.message
    faulty.source.wait_for(TransferEnded, 1)
    assert faulty.source.events[-2:] == [LeaseEnded(key(1), "released"), TransferEnded(key(1))]


def test_pulls_beyond_the_limit_wait_their_turn() -> None:
    """F20: a queue that moves is no stall; a waiting pull can be aborted."""
    settings = TransportSettings(network=InprocNetwork())
    limits = TransferLimits(pulls_in_flight_max=1, stall_s=1.0, heartbeat_s=0.2)
    slow = FaultRule("delay", on="segment", delay_polls=8)
    source = Node(lambda: FaultyTransport(create_transport("inproc", settings), [slow]))
    target = Node(lambda: create_transport("inproc", settings), limits=limits)
    for counter in range(6):
        target.pull(source.offer(counter, (counter,)), source, (counter,))
    target.transceiver.abort_pull(key(5))
    target.wait_for(PullFailed, 5)
    for counter in range(5):
        target.wait_for(PullFinished, counter)
    assert target.transceiver.audit().pulls == 0
    target.close()
    source.close()


def test_abort_lets_the_running_segment_land_first(faulty: FaultyPair) -> None:
    """F17: blocks are free only after the segment that was on its way has landed."""
    faulty.break_("source", FaultRule("delay", on="segment", delay_polls=30))
    offer = faulty.source.offer(1, tuple(range(4)))
    faulty.target.pull(offer, faulty.source, tuple(range(20, 24)))
    wait_until(lambda: faulty.target.transceiver.audit().operations == 1)
    faulty.target.transceiver.abort_pull(key(1))
    faulty.target.wait_for(PullFailed, 1)
    assert (faulty.target.blocks[20:24] == faulty.source.blocks[:4]).all()
    assert faulty.source.lease_cause(1) == "aborted"


def _num_threads() -> int:
    """Of transceivers only: other tests' libraries keep threads of their own."""
    return sum(thread.name == "kv-transceiver" for thread in threading.enumerate())


def test_a_dead_thread_is_never_silent() -> None:
    """The first cause is kept; open pulls fail; draining raises from then on."""

    class Broken(FaultyTransport):
        def post_receive(self, *_: object) -> int:
            raise RuntimeError("the first cause")

    network = InprocNetwork()
    settings = TransportSettings(network=network)
    source = Node(lambda: create_transport("inproc", settings))
    target = Node(lambda: Broken(create_transport("inproc", settings)))
    before = _num_threads()
    target.pull(source.offer(1, (1, 2)), source, (1, 2))
    failed = target.wait_for(PullFailed, 1)
    assert isinstance(failed, PullFailed)
    assert "the first cause" in failed.error.message
    wait_until(lambda: _num_threads() == before - 1)
    with pytest.raises(InternalError, match="the first cause"):
        target.take()
    with pytest.raises(InternalError, match="the first cause"):
        target.take()
    target.transceiver.close()
    source.close()


def test_a_transport_that_does_not_open_raises_from_the_constructor() -> None:
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        Node(lambda: create_transport("carrier-pigeon", TransportSettings()))
    with pytest.raises(ConfigError, match=r"'transfer\.ucx_tls' is 'nonsense'"):
        Node(lambda: create_transport("ucx", TransportSettings(tls="nonsense")))
