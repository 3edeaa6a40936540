"""KV bandwidth between two processes: 256 scattered blocks of 64 KiB, verified on arrival."""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import statistics
import threading
import time
from multiprocessing.connection import Connection

from kv_transfer.events import LeaseEnded, Offer, PoolMemory, Pull, PullFinished, TransferLimits
from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.transceiver import Transceiver
from protos.messages import DisaggRequestId, KvLayout

NUM_BLOCKS = 256
POOL_BLOCKS = 1024
LAYOUT = KvLayout(
    dtype="float32",
    num_layers=8,
    num_kv_heads=1,
    head_dim=64,
    tokens_per_block=16,
    model_fingerprint="bench",
)
WIRES = {"shm": "tcp,self,posix,cma", "tcp": "tcp,self"}
TOKEN = b"benchmark-token!"
WAIT_S = 30.0


def run(is_quick: bool) -> dict[str, float]:
    return {
        f"kv_gb_per_s_{wire}": _gigabytes_per_s(tls, 8 if is_quick else 40)
        for wire, tls in WIRES.items()
    }


class _Side:
    """A transceiver over a pool of its own, and a way to wait for its events."""

    def __init__(self, tls: str, incarnation: int) -> None:
        self.pool = ctypes.create_string_buffer(POOL_BLOCKS * LAYOUT.block_bytes)
        self.news = threading.Event()
        memory = PoolMemory(
            base_address=ctypes.addressof(self.pool), num_blocks=POOL_BLOCKS, layout=LAYOUT
        )
        self.transceiver = Transceiver(
            lambda: create_transport("ucx", TransportSettings(tls=tls)),
            incarnation=incarnation,
            memory=memory,
            limits=TransferLimits(),
            wake=self.news.set,
        )

    def wait_for(self, kind: type) -> None:
        give_up = time.monotonic() + WAIT_S
        while time.monotonic() < give_up:
            self.news.wait(0.5)
            self.news.clear()
            for event in self.transceiver.drain_events():
                if isinstance(event, kind):
                    return
        raise TimeoutError(f"no {kind.__name__} within {WAIT_S} s")


def _blocks(seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(POOL_BLOCKS), NUM_BLOCKS))


def _source(pipe: Connection, tls: str, repetitions: int) -> None:
    side = _Side(tls, incarnation=1)
    pipe.send(side.transceiver.address)
    for counter in range(repetitions):
        side.transceiver.offer(
            Offer(
                disagg_request_id=DisaggRequestId(1, counter, 0),
                pull_token=TOKEN,
                block_ids=_blocks(counter),
                num_tokens=NUM_BLOCKS * LAYOUT.tokens_per_block,
                lease_s=WAIT_S,
                deadline_s=WAIT_S,
            )
        )
        pipe.send(counter)
        side.wait_for(LeaseEnded)
    side.transceiver.close()


def _gigabytes_per_s(tls: str, repetitions: int) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_source, args=(theirs, tls, repetitions), daemon=True)
    child.start()
    side = _Side(tls, incarnation=2)
    address = ours.recv()
    spans_s = [_pull_once(side, ours, address) for _ in range(repetitions)]
    side.transceiver.close()
    child.join(WAIT_S)
    return NUM_BLOCKS * LAYOUT.block_bytes / statistics.median(spans_s[1:]) / 1e9


def _pull_once(side: _Side, pipe: Connection, address: bytes) -> float:
    counter = pipe.recv()
    start = time.perf_counter()
    side.transceiver.pull(
        Pull(
            disagg_request_id=DisaggRequestId(1, counter, 0),
            pull_token=TOKEN,
            source_address=address,
            source_incarnation=1,
            source_layout=LAYOUT,
            num_source_blocks=NUM_BLOCKS,
            block_ids=_blocks(counter + 10_000),
            positions=tuple(range(NUM_BLOCKS)),
            num_tokens=NUM_BLOCKS * LAYOUT.tokens_per_block,
            deadline_s=WAIT_S,
        )
    )
    side.wait_for(PullFinished)
    return time.perf_counter() - start
