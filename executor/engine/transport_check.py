"""Whether UCX works in this process: two transports, one endpoint, one frame.

Asked of every rank of a world: where MPI has loaded its own, older UCX first, it does not.
"""

from __future__ import annotations

import time

from kv_transfer.factory import TransportSettings, create_transport
from kv_transfer.transport import FrameReceived, Transport
from protos.errors import KvTransferError

FRAME = b"does UCX work here?"
ARRIVES_S_MAX = 10.0


def send_frame_over_ucx(tls: str, net_devices: str) -> str:
    """The wires that the endpoint took. Raises ConfigError or KvTransferError."""
    settings = TransportSettings(tls=tls, net_devices=net_devices)
    left = create_transport("ucx", settings)
    try:
        right = create_transport("ucx", settings)
        try:
            left.send_frame(left.connect(right.address), FRAME)
            _await_frame(left, right)
            return left.describe()
        finally:
            right.close()
    finally:
        left.close()


def _await_frame(left: Transport, right: Transport) -> None:
    ends_at_s = time.monotonic() + ARRIVES_S_MAX
    while time.monotonic() < ends_at_s:
        left.poll(0.001)
        events = right.poll(0.001)
        if any(isinstance(event, FrameReceived) and event.frame == FRAME for event in events):
            return
    raise KvTransferError(f"UCX opened but carried no frame within {ARRIVES_S_MAX:g} s")
