"""The generated gRPC stubs of one channel, sync or aio, and what calls on them carry.

The generated code has no types; this is the one place that says so.
"""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2_grpc

from protos import control_pb2_grpc, inference_pb2_grpc

CONTROL_TIMEOUT_S = 10.0
CONTROL_METADATA_KEY = "x-baton-control"
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
"""A proxy of the environment is for the web, not for the servers of a cluster."""


class Stubs:
    def __init__(self, channel: Any) -> None:
        inference: Any = inference_pb2_grpc.InferenceStub
        control: Any = control_pb2_grpc.ControlStub
        health: Any = health_pb2_grpc.HealthStub
        self.inference = inference(channel)
        self.control = control(channel)
        self.health = health(channel)


def control_metadata(control_token: str | None) -> tuple[tuple[str, str], ...]:
    return ((CONTROL_METADATA_KEY, control_token),) if control_token else ()
