"""What both ends of a lane must know of it: one frontend's two queues to the worker.

The high bits of every `client_id` are the frontend id, so a result finds its
lane without a table, and a lane can speak of its own requests only.
"""

from __future__ import annotations

import msgspec

OWNER_ID = 0
"""The frontend id of the process that owns the worker world."""


class LaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's view. `key` seals both directions of this lane and of no other.

    Where the worker binds, an endpoint may end in a port of `*`; the one that was
    taken is told by `LaneOpened`. `curve_secret_key` makes the worker's sockets
    CURVE servers: over tcp only who knows the public half can take the lane's place.
    Where the frontend binds over tcp, `curve_server_key` is its public half.
    `silence_s`: without a word from the frontend for so long the worker closes the
    lane; 0 leaves that to the owner, who sees the frontend's process.
    """

    frontend_id: int
    key: bytes
    requests_endpoint: str
    results_endpoint: str
    worker_binds: bool = False
    curve_secret_key: bytes = b""
    curve_server_key: bytes = b""
    silence_s: float = 0.0
    num_buckets: int = 0
    """How many postprocess workers the frontend has; 0: it makes text itself."""
