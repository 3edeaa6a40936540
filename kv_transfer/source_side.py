"""The context side's shell: runs source sessions over a transport and the pool.

Checks what a pull claims before anything else: incarnation, token, layout,
block count, positions. What cannot be served is refused by name (`Stopped`).
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from kv_transfer import frames
from kv_transfer import source_session as machine
from kv_transfer.events import Offer, TransferEnded, TransferLimits
from kv_transfer.leases import Refusal
from kv_transfer.links import Link, Links
from kv_transfer.memory import BlockMemory
from kv_transfer.outbox import Outbox
from kv_transfer.source_session import SourceEvent, SourceSession, SourceState
from kv_transfer.transport import Transport
from protos.messages import DisaggRequestId

_Key = tuple[int, int]


@dataclass(slots=True)
class _Run:
    """One pull being served. `blocks[i]` is the block for position i of the pull."""

    key: _Key
    disagg_request_id: DisaggRequestId
    session: SourceSession
    link: Link
    blocks: Sequence[int]
    progress_at: float
    started_at: float
    is_acked: bool = False


class SourceSide:
    def __init__(
        self,
        transport: Transport,
        links: Links,
        outbox: Outbox,
        memory: BlockMemory,
        limits: TransferLimits,
        incarnation: int,
        layout_digest: bytes,
    ) -> None:
        self._transport = transport
        self._links = links
        self._outbox = outbox
        self._memory = memory
        self._limits = limits
        self._incarnation = incarnation
        self._layout_digest = layout_digest
        self._runs: dict[_Key, _Run] = {}
        self._by_id: dict[DisaggRequestId, _Run] = {}
        self._by_operation: dict[int, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def num_operations(self) -> int:
        return len(self._by_operation)

    def on_pull(self, frame: frames.PullFrame, now: float) -> None:
        key = (frame.sender, frame.session)
        if key in self._runs:
            self._outbox.count("duplicate_pulls")
            return
        link = self._links.open(frame.reply_address, frame.sender, now)
        found = self._accept(frame)
        if isinstance(found, Refusal):
            self._outbox.count(f"pulls_refused_{found.reason}")
            stopped = frames.Stopped(
                sender=self._incarnation,
                session=frame.session,
                reason=found.reason,
                message=found.message[:512],
            )
            self._links.send(link, stopped)
            self._links.end_session(link)
            return
        blocks = [found.block_ids[position] for position in _positions(frame)]
        segment_bytes = min(self._limits.segment_bytes_max, frame.segment_bytes_max)
        blocks_per_segment = max(1, segment_bytes // self._memory.block_bytes)
        pieces = machine.cut_segments(len(blocks), blocks_per_segment)
        session = SourceSession(f"{found.disagg_request_id} of session {key}", pieces)
        run = _Run(key, found.disagg_request_id, session, link, blocks, now, now)
        self._runs[key] = self._by_id[run.disagg_request_id] = run
        self._handle(run, machine.Granted(frame.credit), now)

    def on_frame(
        self, frame: frames.Credit | frames.Resend | frames.Ack | frames.Abort, now: float
    ) -> None:
        run = self._runs.get((frame.sender, frame.session))
        if run is None:
            self._outbox.count("late_frames")
            return
        self._handle(run, _event_of(frame), now)

    def on_sent(self, operation: int, error: str, now: float) -> bool:
        """False where the operation is not one of ours."""
        run = self._by_operation.pop(operation, None)
        if run is None:
            return False
        run.link.progress_at = now
        self._outbox.touch(run.disagg_request_id, now)
        self._handle(run, machine.SegmentLeft(error), now)
        return True

    def on_lease_over(self, key: DisaggRequestId, cause: str, now: float) -> None:
        run = self._by_id.get(key)
        if run is not None:
            self._handle(run, machine.LeaseOver(cause), now)

    def on_peer_down(self, peer: int, cause: str, now: float) -> None:
        for run in [run for run in self._runs.values() if run.link.peer == peer]:
            self._handle(run, machine.PeerLost(cause), now)

    def tick(self, now: float) -> None:
        """The target gives up a stalled pull first (after stall_s); we are its safety net."""
        for run in list(self._runs.values()):
            moved_at = max(run.progress_at, run.link.progress_at)
            if self._links.is_silent(run.link, now):
                self._links.close(run.link, f"silent for {self._limits.stall_s:g} s")
            elif run.session.sends_in_flight and now - moved_at >= 2 * self._limits.stall_s:
                self._links.close(run.link, f"took no segment for {now - moved_at:.1f} s")

    def end_all(self) -> None:
        """The transport is closed: nothing reads the blocks any more."""
        for run in self._runs.values():
            self._outbox.put(TransferEnded(run.disagg_request_id))
        self._runs.clear()
        self._by_id.clear()
        self._by_operation.clear()

    def _accept(self, frame: frames.PullFrame) -> Offer | Refusal:
        if frame.source != self._incarnation:
            return Refusal("incarnation", f"this is incarnation {self._incarnation:x}")
        key = frame.disagg_request_id
        found = self._outbox.peek(key, frame.pull_token)
        if isinstance(found, Refusal):
            return found
        if key in self._by_id:
            return Refusal("busy", "another pull of it is running")
        if frame.layout_digest != self._layout_digest:
            return Refusal("layout", "the target believes in another KV layout than ours")
        offered = len(found.offer.block_ids)
        if frame.num_source_blocks != offered:
            return Refusal("blocks", f"{offered} blocks are offered, not {frame.num_source_blocks}")
        if any(not 0 <= position < offered for position in _positions(frame)):
            return Refusal("positions", f"a position lies outside the {offered} offered blocks")
        started = self._outbox.begin_transfer(key, frame.pull_token)
        return started if isinstance(started, Refusal) else started.offer

    def _handle(self, run: _Run, event: SourceEvent, now: float) -> None:
        run.progress_at = now
        for effect in run.session.handle(event):
            match effect:
                case machine.SendSegment():
                    self._send_segment(run, effect)
                case machine.SayStopped(reason, message):
                    self._say(run, reason, message)
                case machine.EndLease(cause):
                    run.is_acked = run.is_acked or cause == "acked"
                    self._outbox.end_lease(run.disagg_request_id, cause)
                case machine.TransferOver():
                    self._end(run)
                case _:
                    assert_never(effect)

    def _send_segment(self, run: _Run, effect: machine.SendSegment) -> None:
        regions = self._memory.regions(run.blocks[effect.first : effect.first + effect.count])
        announce = frames.Announce(
            sender=self._incarnation,
            session=run.key[1],
            segment=effect.segment,
            first=effect.first,
            count=effect.count,
            num_bytes=effect.count * self._memory.block_bytes,
            checksum=self._memory.checksum(regions),
        )
        self._links.send(run.link, announce)
        tag = frames.segment_tag(run.key[1], effect.segment)
        operation = self._transport.send_segment(run.link.peer, tag, regions)
        self._by_operation[operation] = run

    def _say(self, run: _Run, reason: str, message: str) -> None:
        stopped = frames.Stopped(
            sender=self._incarnation, session=run.key[1], reason=reason, message=message[:512]
        )
        self._links.send(run.link, stopped)

    def _end(self, run: _Run) -> None:
        assert run.session.state is SourceState.ENDED
        if run.is_acked:
            self._outbox.count("sent_bytes", len(run.blocks) * self._memory.block_bytes)
            self._outbox.count("sent_ms", round((run.progress_at - run.started_at) * 1000))
        del self._runs[run.key]
        del self._by_id[run.disagg_request_id]
        self._links.end_session(run.link)
        self._outbox.put(TransferEnded(run.disagg_request_id))


def _positions(frame: frames.PullFrame) -> Sequence[int]:
    return array.array("i", frame.positions)


def _event_of(frame: frames.Credit | frames.Resend | frames.Ack | frames.Abort) -> SourceEvent:
    match frame:
        case frames.Credit():
            return machine.Granted(frame.segments)
        case frames.Resend():
            return machine.ResendAsked(frame.segment)
        case frames.Ack():
            return machine.Acked()
        case frames.Abort():
            return machine.AbortAsked()
        case _:
            assert_never(frame)
