"""A source in a process of its own, to be measured, stopped and killed.

Run as `python -m tests.support.kv_child TLS NUM_BLOCKS BLOCK_TOKENS SEGMENT_BYTES`; it
prints one line of JSON (address, incarnation), offers every pair of leases
forever under counters 1, 2, ..., each over all of its blocks, and ends with
its standard input.
"""

from __future__ import annotations

import json
import sys

from kv_transfer.events import LeaseEnded, TransferLimits
from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.faulty import FaultRule, FaultyTransport
from kv_transfer.transport import Transport
from protos.messages import KvLayout
from tests.support.kv_pair import Node

NUM_OFFERS = 40


def layout_of(block_bytes: int) -> KvLayout:
    return KvLayout(
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=block_bytes // 128,
        tokens_per_block=16,
        model_fingerprint="child",
    )


def main() -> None:
    tls, num_blocks, block_bytes, segment_bytes, drop_from = sys.argv[1:6]

    def factory() -> Transport:
        made = create_transport("ucx", TransportSettings(tls=tls))
        if int(drop_from) < 0:
            return made
        return FaultyTransport(made, [FaultRule("drop", on="segment", skip=int(drop_from))])

    limits = TransferLimits(segment_bytes_max=int(segment_bytes), stall_s=1.0, heartbeat_s=0.2)
    node = Node(
        factory,
        num_blocks=int(num_blocks),
        layout=layout_of(int(block_bytes)),
        limits=limits,
        incarnation=77,
    )
    node.fill(5)
    order = tuple(range(0, int(num_blocks), 2)) + tuple(range(1, int(num_blocks), 2))
    for counter in range(1, NUM_OFFERS + 1):
        node.offer(counter, order, lease_s=60.0, deadline_s=60.0)
    print(json.dumps({"address": node.transceiver.address.hex()}), flush=True)
    for line in sys.stdin:
        node.take()
        causes = [e.cause for e in node.events if isinstance(e, LeaseEnded)]
        print(json.dumps({"asked": line.strip(), "lease_causes": causes}), flush=True)
    node.close()


if __name__ == "__main__":
    main()
