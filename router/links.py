"""The gRPC channels to the servers, opened at start and closed at the end.

A channel is one connection. It connects by itself and again after a loss, at most a
second later. A server whose frontends share a port is reached by several, since a
connection belongs to one frontend; they take turns. The cluster's control token rides
on every call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from common.rpc import MESSAGE_BYTES_MAX
from common.security import CONTROL_METADATA_KEY, ClusterSecret
from protos import control_pb2_grpc, inference_pb2_grpc

CLOSE_S_MAX = 1.0

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment has no place between servers
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)


@dataclass(frozen=True)
class Link:
    """How to call one server. The stubs are generated code without types."""

    address: str
    channels: tuple[grpc.aio.Channel, ...]
    stubs: Iterator[Any]
    """Of Inference, one a channel, in turn and without end."""
    control: Any
    metadata: tuple[tuple[str, str], ...]

    @property
    def inference(self) -> Any:
        """The stub whose turn it is."""
        return next(self.stubs)


class Links:
    def __init__(
        self, addresses: Sequence[str], secret: ClusterSecret, connections_per_server: int = 1
    ) -> None:
        metadata = ((CONTROL_METADATA_KEY, secret.control_token()),)
        self._links = {
            address: _open(address, connections_per_server, metadata) for address in addresses
        }
        self._ending: dict[int, Any] = {}

    def __getitem__(self, address: str) -> Link:
        return self._links[address]

    @property
    def num_ending(self) -> int:
        return len(self._ending)

    def let_end(self, call: Any) -> None:
        """Keep a call whose last message was read until its status came too.

        Dropping it sooner would cancel it, and the server would take that for a
        client that left.
        """
        key = id(call)
        self._ending[key] = call
        call.add_done_callback(lambda _: self._ending.pop(key, None))

    async def close(self) -> None:
        channels = [channel for link in self._links.values() for channel in link.channels]
        closing = [channel.close(CLOSE_S_MAX) for channel in channels]
        await asyncio.gather(*closing)


def _open(address: str, num_channels: int, metadata: tuple[tuple[str, str], ...]) -> Link:
    channels = tuple(
        grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) for _ in range(num_channels)
    )
    stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    return Link(
        address=address,
        channels=channels,
        stubs=itertools.cycle(stubs),
        control=control_pb2_grpc.ControlStub(channels[0]),  # type: ignore[no-untyped-call]
        metadata=metadata,
    )
