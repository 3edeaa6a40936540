"""Two transceivers over small pools of numbered blocks, and the waits that tests need."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable

import numpy as np

from kv_transfer.events import (
    LeaseEnded,
    Offer,
    PoolMemory,
    Pull,
    TransceiverEvent,
    TransferLimits,
)
from kv_transfer.transceiver import Transceiver
from kv_transfer.transport import Transport
from protos.messages import DisaggRequestId, KvLayout

LAYOUT = KvLayout(
    dtype="float32",
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    tokens_per_block=16,
    model_fingerprint="test",
)
LIMITS = TransferLimits(segment_bytes_max=4 * LAYOUT.block_bytes, stall_s=1.0, heartbeat_s=0.2)
_counter = itertools.count(1)


class Node:
    """One engine's pool and transceiver; `events` gathers what it said, in order."""

    def __init__(
        self,
        factory: Callable[[], Transport],
        *,
        num_blocks: int = 64,
        layout: KvLayout = LAYOUT,
        limits: TransferLimits = LIMITS,
        incarnation: int | None = None,
    ) -> None:
        self.layout = layout
        self.memory = mmap.mmap(-1, num_blocks * layout.block_bytes)
        self.blocks = np.frombuffer(self.memory, dtype=np.uint8).reshape(num_blocks, -1)
        self.incarnation = next(_counter) if incarnation is None else incarnation
        self.news = threading.Event()
        self.events: list[TransceiverEvent] = []
        self.transceiver = Transceiver(
            factory,
            incarnation=self.incarnation,
            memory=PoolMemory(
                base_address=self.blocks.ctypes.data, num_blocks=num_blocks, layout=layout
            ),
            limits=limits,
            wake=self.news.set,
        )

    def fill(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.blocks[:] = generator.integers(0, 256, self.blocks.shape, dtype=np.uint8)

    def offer(self, counter: int, block_ids: tuple[int, ...], **changes: object) -> Offer:
        fields: dict[str, object] = {
            "disagg_request_id": key(counter),
            "pull_token": b"token-%d" % counter,
            "block_ids": block_ids,
            "num_tokens": 16 * len(block_ids),
            "lease_s": 5.0,
            "deadline_s": 30.0,
        }
        offer = Offer(**(fields | changes))  # type: ignore[arg-type]
        self.transceiver.offer(offer)
        return offer

    def pull_of(
        self, offer: Offer, source: Node, block_ids: tuple[int, ...], **changes: object
    ) -> Pull:
        fields: dict[str, object] = {
            "disagg_request_id": offer.disagg_request_id,
            "pull_token": offer.pull_token,
            "source_address": source.transceiver.address,
            "source_incarnation": source.incarnation,
            "source_layout": source.layout,
            "num_source_blocks": len(offer.block_ids),
            "block_ids": block_ids,
            "positions": tuple(range(len(offer.block_ids)))[: len(block_ids)],
            "num_tokens": 16 * len(block_ids),
            "deadline_s": 30.0,
        }
        return Pull(**(fields | changes))  # type: ignore[arg-type]

    def pull(
        self, offer: Offer, source: Node, block_ids: tuple[int, ...], **changes: object
    ) -> None:
        self.transceiver.pull(self.pull_of(offer, source, block_ids, **changes))

    def take(self) -> list[TransceiverEvent]:
        fresh = self.transceiver.drain_events()
        self.events.extend(fresh)
        return fresh

    def wait(
        self, is_there: Callable[[list[TransceiverEvent]], bool], timeout_s: float = 10.0
    ) -> list[TransceiverEvent]:
        """Until the events so far satisfy `is_there`; all of them, in order."""
        end = time.monotonic() + timeout_s
        while True:
            self.news.clear()
            self.take()
            if is_there(self.events):
                return self.events
            left = end - time.monotonic()
            assert left > 0, (
                f"not in {timeout_s} s; so far {self.events}, {self.transceiver.audit()}"
            )
            self.news.wait(left)

    def wait_for(self, kind: type, counter: int, timeout_s: float = 10.0) -> TransceiverEvent:
        def matches(event: TransceiverEvent) -> bool:
            return isinstance(event, kind) and event.disagg_request_id == key(counter)

        events = self.wait(lambda all_: any(matches(e) for e in all_), timeout_s)
        return next(event for event in events if matches(event))

    def lease_cause(self, counter: int, timeout_s: float = 10.0) -> str:
        ended = self.wait_for(LeaseEnded, counter, timeout_s)
        assert isinstance(ended, LeaseEnded)
        return ended.cause

    def close(self) -> None:
        self.transceiver.close()
        self.take()


def key(counter: int) -> DisaggRequestId:
    return DisaggRequestId(7, counter, 1)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not so within {timeout_s} s"
        time.sleep(0.01)
