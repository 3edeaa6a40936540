"""The generation side's shell: runs target sessions over a transport and the pool.

Pulls beyond `pulls_in_flight_max` wait in order; their clock for stalls starts
when they do, only the request's own deadline runs on. Session numbers count up
and are never used twice, so neither are the tags made from them.
"""

from __future__ import annotations

import array
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from kv_transfer import frames
from kv_transfer import target_session as machine
from kv_transfer.events import PoolMemory, Pull, PullFailed, PullFinished, TransferLimits
from kv_transfer.links import Link, Links
from kv_transfer.memory import BlockMemory
from kv_transfer.outbox import Outbox
from kv_transfer.pull_checks import what_is_wrong
from kv_transfer.target_session import TargetEvent, TargetSession, TargetState
from kv_transfer.transport import Region, Transport
from protos.errors import DeadlineExceededError, ErrorData, KvTransferError, RequestCancelledError
from protos.messages import DisaggRequestId, KvStats


@dataclass(slots=True)
class _Waiting:
    pull: Pull
    deadline_at: float


@dataclass(slots=True)
class _Run:
    number: int
    pull: Pull
    session: TargetSession
    link: Link
    progress_at: float
    deadline_at: float
    regions: dict[int, list[Region]] = field(default_factory=dict)
    """Of the receives that are posted, by segment."""


class TargetSide:
    def __init__(
        self,
        transport: Transport,
        links: Links,
        outbox: Outbox,
        memory: BlockMemory,
        pool: PoolMemory,
        limits: TransferLimits,
        incarnation: int,
        wires: Callable[[], str],
    ) -> None:
        self._transport = transport
        self._links = links
        self._outbox = outbox
        self._memory = memory
        self._pool = pool
        self._limits = limits
        self._incarnation = incarnation
        self._wires = wires
        self._numbers = itertools.count(1)
        self._waiting: deque[_Waiting] = deque()
        self._runs: dict[int, _Run] = {}
        self._by_id: dict[DisaggRequestId, _Run] = {}
        self._by_operation: dict[int, tuple[_Run, int]] = {}

    def __len__(self) -> int:
        return len(self._runs) + len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def num_operations(self) -> int:
        return len(self._by_operation)

    def pull(self, pull: Pull, now: float) -> None:
        wrong = what_is_wrong(pull, self._pool, self._limits)
        if wrong is not None:
            self._outbox.put(PullFailed(pull.disagg_request_id, wrong))
            return
        self._waiting.append(_Waiting(pull, now + pull.deadline_s))
        self._start_waiting(now)

    def abort(self, key: DisaggRequestId, error: ErrorData, now: float) -> None:
        run = self._by_id.get(key)
        if run is not None:
            self._handle(run, machine.AbortAsked(error), now)
            return
        for waiting in self._waiting:
            if waiting.pull.disagg_request_id == key:
                self._waiting.remove(waiting)
                self._outbox.put(PullFailed(key, error))
                return

    def on_frame(self, frame: frames.Announce | frames.Stopped, now: float) -> None:
        run = self._runs.get(frame.session)
        if run is None or not _is_from_source(frame, run.pull):
            self._outbox.count("late_frames")
            return
        if isinstance(frame, frames.Stopped):
            event: TargetEvent = machine.SourceStopped(frame.reason, frame.message)
        else:
            event = machine.Announced(
                frame.segment, frame.first, frame.count, frame.num_bytes, frame.checksum
            )
        self._handle(run, event, now)

    def on_received(self, operation: int, error: str, now: float) -> bool:
        """False where the operation is not one of ours."""
        found = self._by_operation.pop(operation, None)
        if found is None:
            return False
        run, segment = found
        run.link.progress_at = run.link.heard_at = now
        regions = run.regions.pop(segment)
        checksum = 0 if error else self._memory.checksum(regions)
        self._handle(run, machine.Landed(segment, checksum, error), now)
        return True

    def on_peer_down(self, peer: int, cause: str, now: float) -> None:
        for run in [run for run in self._runs.values() if run.link.peer == peer]:
            self._handle(run, machine.PeerLost(cause), now)

    def tick(self, now: float) -> None:
        for run in list(self._runs.values()):
            self._check_time(run, now)
        for waiting in [w for w in self._waiting if now >= w.deadline_at]:
            self._waiting.remove(waiting)
            self._outbox.put(PullFailed(waiting.pull.disagg_request_id, _deadline_error()))
        self._start_waiting(now)

    def end_all(self, error: ErrorData) -> None:
        """The transport is closed: nothing writes the blocks any more."""
        pulls = [run.pull for run in self._runs.values()] + [w.pull for w in self._waiting]
        for pull in pulls:
            self._outbox.put(PullFailed(pull.disagg_request_id, error))
        self._runs.clear()
        self._by_id.clear()
        self._by_operation.clear()
        self._waiting.clear()

    def _check_time(self, run: _Run, now: float) -> None:
        stall_s = self._limits.stall_s
        moved_at = max(run.progress_at, run.link.progress_at)
        if self._links.is_silent(run.link, now):
            self._handle(run, machine.Stalled(True, stall_s), now)
        elif now - moved_at >= stall_s:
            self._handle(run, machine.Stalled(False, stall_s), now)
        elif now >= run.deadline_at and run.session.state is TargetState.PULLING:
            self._handle(run, machine.AbortAsked(_deadline_error()), now)

    def _start_waiting(self, now: float) -> None:
        while self._waiting and len(self._runs) < self._limits.pulls_in_flight_max:
            waiting = self._waiting.popleft()
            self._start(waiting.pull, waiting.deadline_at, now)

    def _start(self, pull: Pull, deadline_at: float, now: float) -> None:
        assert pull.disagg_request_id not in self._by_id, f"{pull.disagg_request_id} pulled twice"
        number = next(self._numbers)
        link = self._links.open(pull.source_address, pull.source_incarnation, now)
        session = TargetSession(
            str(pull.disagg_request_id),
            len(pull.positions),
            self._memory.block_bytes,
            max(1, self._limits.segment_bytes_max // self._memory.block_bytes),
        )
        run = _Run(number, pull, session, link, now, deadline_at)
        self._runs[number] = self._by_id[pull.disagg_request_id] = run
        self._links.send(link, self._pull_frame(run))
        self._apply(run, session.start())

    def _pull_frame(self, run: _Run) -> frames.PullFrame:
        pull = run.pull
        return frames.PullFrame(
            sender=self._incarnation,
            session=run.number,
            source=pull.source_incarnation,
            router_epoch=pull.disagg_request_id.router_epoch,
            counter=pull.disagg_request_id.counter,
            attempt=pull.disagg_request_id.attempt,
            pull_token=pull.pull_token,
            reply_address=self._transport.address,
            layout_digest=frames.layout_digest(pull.source_layout),
            num_source_blocks=pull.num_source_blocks,
            segment_bytes_max=self._limits.segment_bytes_max,
            credit=min(max(1, self._limits.segments_in_flight_max), frames.GRANT_MAX),
            positions=array.array("i", pull.positions).tobytes(),
        )

    def _handle(self, run: _Run, event: TargetEvent, now: float) -> None:
        run.progress_at = now
        self._apply(run, run.session.handle(event))

    def _apply(self, run: _Run, effects: machine.TargetEffects) -> None:
        for effect in effects:
            match effect:
                case machine.PostReceive():
                    self._post(run, effect)
                case machine.ClosePeer(cause):
                    self._links.close(run.link, cause)
                case machine.Done():
                    self._end(run)
                    self._outbox.put(PullFinished(run.pull.disagg_request_id, self._stats(run)))
                case machine.Failed(error):
                    self._end(run)
                    self._outbox.put(PullFailed(run.pull.disagg_request_id, error))
                case _:
                    self._links.send(run.link, self._frame_of(run, effect))

    def _frame_of(
        self,
        run: _Run,
        effect: machine.GrantCredit | machine.AskResend | machine.SendAck | machine.SendAbort,
    ) -> frames.Frame:
        sender, session = self._incarnation, run.number
        match effect:
            case machine.GrantCredit(segments):
                return frames.Credit(sender=sender, session=session, segments=segments)
            case machine.AskResend(segment):
                return frames.Resend(sender=sender, session=session, segment=segment)
            case machine.SendAck():
                return frames.Ack(sender=sender, session=session)
            case machine.SendAbort():
                return frames.Abort(sender=sender, session=session)
            case _:
                assert_never(effect)

    def _post(self, run: _Run, effect: machine.PostReceive) -> None:
        blocks = run.pull.block_ids[effect.first : effect.first + effect.count]
        regions = self._memory.regions(blocks)
        run.regions[effect.segment] = regions
        tag = frames.segment_tag(run.number, effect.segment)
        operation = self._transport.post_receive(run.link.peer, tag, regions)
        self._by_operation[operation] = (run, effect.segment)

    def _end(self, run: _Run) -> None:
        assert run.session.state is TargetState.ENDED
        assert not run.regions, f"{run.pull.disagg_request_id} ended with receives posted"
        del self._runs[run.number]
        del self._by_id[run.pull.disagg_request_id]
        self._links.end_session(run.link)

    def _stats(self, run: _Run) -> KvStats:
        num_blocks = len(run.pull.block_ids)
        return KvStats(
            transferred_tokens=run.pull.num_tokens if num_blocks else 0,
            transferred_blocks=num_blocks,
            transferred_bytes=num_blocks * self._memory.block_bytes,
            transport=self._wires(),
        )


def _is_from_source(frame: frames.Announce | frames.Stopped, pull: Pull) -> bool:
    """Another incarnation at that address may say only that it is another one."""
    if frame.sender == pull.source_incarnation:
        return True
    return isinstance(frame, frames.Stopped) and frame.reason == "incarnation"


def _deadline_error() -> ErrorData:
    return DeadlineExceededError("the request's deadline passed while its KV was pulled").to_data()


def cancelled_error() -> ErrorData:
    return RequestCancelledError("the request was cancelled while its KV was pulled").to_data()


def closed_error(cause: str) -> ErrorData:
    return KvTransferError(f"the data plane of this server closed: {cause}").to_data()
