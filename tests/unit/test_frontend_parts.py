"""Parts of a server with several frontends that need no process."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from common.rpc import hold_port
from common.security import ClusterSecret
from executor.attach.keys import AttachKeys
from executor.attach.point import AttachPoint, rpc_point
from executor.config import EngineConfig, ExecutorConfig
from executor.preflight import why_no_text
from generation_server.config import GenerationServerConfig
from protos.errors import ConfigError, EngineDeadError
from protos.messages import ModelInfo, ModelLimits
from serving.front import FrontOrders, pack_orders, read_orders
from serving.restarts import DELAY_S_MAX, GOOD_LIFE_S, Restarts

POINT = AttachPoint(
    form="attach", endpoint="ipc:///x/attach", keys=AttachKeys({"local": b"k" * 32}), where="x"
)


def config(**more: object) -> GenerationServerConfig:
    data = {"secret_file": "s", "listen": "127.0.0.1:8000", **more}
    return msgspec.convert(data, GenerationServerConfig)


def test_a_frontend_is_told_its_seat_by_a_descriptor() -> None:
    orders = FrontOrders.of(config(metrics_listen="127.0.0.1:9000"), 2, "127.0.0.1:8123", POINT)
    reader, writer = os.pipe()
    os.write(writer, pack_orders(orders))
    os.close(writer)
    told = read_orders(reader)
    os.close(reader)
    assert told == orders
    with pytest.raises(EngineDeadError, match="launcher of this frontend is gone"):
        told.check_launcher()  # we are no child of ourselves
    msgspec.structs.replace(told, launcher_pid=os.getppid()).check_launcher()
    assert told.point.keys.keys == {"local": b"k" * 32}
    seat = told.seat(config(metrics_listen="127.0.0.1:9000"))
    assert (seat.listen, seat.metrics_listen) == ("127.0.0.1:8123", "127.0.0.1:9002")


@pytest.mark.parametrize(("listen", "second"), [("", ""), ("127.0.0.1:0", "127.0.0.1:0")])
def test_no_metrics_and_any_port_stay_so(listen: str, second: str) -> None:
    orders = FrontOrders.of(config(metrics_listen=listen), 1, "127.0.0.1:8000", POINT)
    assert orders.metrics_listen == second


def test_restarts_come_ever_later_until_one_lives() -> None:
    seat = Restarts()
    delays = [seat.delay_s(1.0) for _ in range(12)]
    assert delays[:3] == [0.2, 0.4, 0.8]
    assert delays[-1] == DELAY_S_MAX
    assert seat.delay_s(GOOD_LIFE_S) == 0.2


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"engine": {"executor": {"form": "single"}}}, "1 with engine.executor.form single"),
        ({"engine": {"executor": {"rpc_address": "h:1"}}}, "start one server for each"),
        ({"metrics_listen": "127.0.0.1:65535"}, "a port up to 65534"),
    ],
)
def test_frontends_that_cannot_be_are_refused(more: dict[str, object], told: str) -> None:
    config(frontends=1, **more).check()
    with pytest.raises(ConfigError, match=told):
        config(frontends=2, **more).check()


def test_a_held_port_takes_no_connection_and_is_held_from_others() -> None:
    holder, address = hold_port("127.0.0.1:0")
    with holder:
        host, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=1)
        with pytest.raises(ConfigError, match="address already in use"):
            hold_port(address)


@pytest.mark.parametrize("address", ["0.0.0.0:8201", "[::]:8201", "worker:0", "worker"])
def test_an_rpc_address_names_one_place(address: str) -> None:
    engine = EngineConfig(executor=ExecutorConfig(rpc_address=address))
    with pytest.raises(ConfigError, match="rpc_address"):
        rpc_point(engine, ClusterSecret({"k": b"k" * 16}))


def test_an_rpc_point_has_the_signing_key_first() -> None:
    engine = EngineConfig(executor=ExecutorConfig(rpc_address="worker:8201"))
    point = rpc_point(engine, ClusterSecret({"new": b"n" * 16, "old": b"o" * 16}))
    assert point is not None
    assert (point.form, point.endpoint, point.host) == ("rpc", "tcp://worker:8201", "worker")
    assert point.keys.first_id == "new"
    assert len(set(point.keys.keys.values()) | {b"n" * 16}) == 3
    assert rpc_point(EngineConfig(), ClusterSecret({"k": b"k" * 16})) is None


@pytest.mark.parametrize(
    ("engine", "architecture", "is_told"),
    [
        ({"executor": {"rpc_address": "h:1"}}, "llama", True),
        ({"executor": {"rpc_address": "h:1"}, "model": "/m"}, "llama", False),
        ({"executor": {"rpc_address": "h:1"}}, "scripted", False),
        ({}, "llama", False),
    ],
)
def test_an_attached_server_without_a_tokenizer_is_told(
    engine: dict[str, object], architecture: str, is_told: bool
) -> None:
    """Bug: it came up as ready, and refused every text, with no word in its log of why."""
    limits = ModelLimits(model="smollm2", vocab_size=9, max_prompt_tokens=9, max_total_tokens=9)
    model = ModelInfo(limits=limits, dtype="float32", num_parameters=1, architecture=architecture)
    why = why_no_text(msgspec.convert(engine, EngineConfig), model)
    assert ("engine.model" in why and "'smollm2'" in why) == is_told
