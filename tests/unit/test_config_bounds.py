"""Values that were taken and then broke every request are refused at load, by key and limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from baton.launch.config import ClusterConfig, merge
from baton.launch.plan import check_plans
from common.config import parse_config
from executor.config import EngineConfig
from executor.engine.factory import create_engine
from executor.engine.models.config import parse_hf
from generation_server.config import GenerationServerConfig
from protos.errors import ConfigError
from router.config import RouterConfig

SERVER = {"secret_file": "secret", "engine": {"model": "m"}}
ROUTER = {
    "secret_file": "secret",
    "context_servers": ["127.0.0.1:1"],
    "generation_servers": ["127.0.0.1:2"],
}
CLUSTER = {"model": "m"}
INF, NAN = math.inf, math.nan

ENGINE_BOUNDS = [
    ("transfer.lease_ms", (-1, 0, 10**12), "at least 1, at most 3600000"),
    ("transfer.stall_ms", (0, -1), "at least 1"),
    ("transfer.heartbeat_ms", (0, -1), "at least 1"),
    ("transfer.heartbeat_ms", (3000, 5000), "under stall_ms, 3000"),
    ("transfer.segment_bytes_max", (0, -1), "at least 1"),
    ("transfer.segments_in_flight_max", (0, -1, 10**6), "at least 1"),
    ("transfer.transport", ("x",), "one of ucx, inproc"),
    ("max_prompt_tokens", (-1, 10**12), "at least 0"),
    ("max_total_tokens", (-1,), "at least 0"),
    ("max_total_tokens", (1,), "0 or at least 2"),
    ("num_threads", (-1, 10**6), "at most 1024"),
    ("kv_cache.num_blocks", (0, -1, 10**12), "at least 1"),
    ("kv_cache.tokens_per_block", (0, -1, 10**6), "at least 1"),
    ("kv_cache.leased_share_max", (0, -1, 1.01, NAN, INF), "over 0, at most 1"),
    ("default_deadline_s", (0, -1, INF, NAN, 1e9), "over 0, at most 86400"),
    ("scheduler.max_sequences", (0, -1), "at least 1"),
    ("scheduler.max_queued", (0, -1), "at least 1"),
    ("scheduler.max_batch_tokens", (0, -1), "at least 1"),
    ("scheduler.max_batch_tokens", (3,), "at least max_sequences, 64"),
    ("scheduler.prefill_chunk_tokens", (0, -5), "at least 1"),
    ("scheduler.prefill_chunk_tokens", (1025, 10**9), "at most max_batch_tokens, 1024"),
    ("scripted.step_ms", (-1, NAN, INF), "at least 0"),
    ("scripted.load_ms", (-1, NAN, INF), "at least 0"),
    ("scripted.hang_s", (-1, NAN, INF), "at least 0"),
    ("scripted.vocab_size", (0, -1), "at least 1"),
    ("scripted.max_total_tokens", (1, -1), "at least 2"),
    ("scripted.crash_token_id", (-2,), "at least -1"),
    ("served_model_name", ("a\nb", "x" * 129, " ", "\x7f"), "1 to 128 printable characters"),
]
SERVER_BOUNDS = [
    *((f"engine.{key}", values, limit) for key, values, limit in ENGINE_BOUNDS),
    ("engine.transfer.transport", ("inproc",), "ucx: inproc joins engines of one process"),
    ("engine.transfer.ucx_net_devices", ("nodev0", "lo,nodev0", "lo,"), "devices of this host: lo"),
    ("name", ("", "a\nb", "x" * 129, "a\x00"), "1 to 128 printable characters"),
    ("listen", ("", "nohost", ":0", "127.0.0.1:70000", "127.0.0.1:-1"), "HOST:PORT"),
    ("metrics_listen", ("x", "127.0.0.1:70000"), "HOST:PORT"),
    ("shutdown_grace_s", (-1, NAN, INF), "at least 0, at most 600"),
    ("max_open_requests", (0, -1), "at least 1"),
    ("max_unread_tokens", (-1, 1 << 31), "at least 0, at most 2147483647"),
]
ROUTER_BOUNDS = [
    ("name", ("", "a\nb", "x" * 129), "1 to 128 printable characters"),
    ("listen", ("x", "127.0.0.1:70000"), "HOST:PORT"),
    ("metrics_listen", ("x",), "HOST:PORT"),
    ("context_servers", ([],), "at least one HOST:PORT"),
    ("context_servers", (["a"], ["127.0.0.1:0"], ["unix:/x"]), "HOST:PORT"),
    ("context_servers", (["127.0.0.1:1", "127.0.0.1:1"],), r"context_servers\[0\] is the same"),
    ("context_servers", (["127.0.0.1:1", "localhost:1"],), r"context_servers\[0\] is the same"),
    ("context_servers", (["localhost:2"],), "listed once"),
    ("generation_servers", ([], ["127.0.0.1:0"]), "HOST:PORT"),
    ("default_deadline_s", (0, -1, INF, NAN, 1e30), "over 0, at most 86400"),
    ("max_in_flight", (0, -1), "at least 1"),
    ("heartbeat_s", (0, -1, NAN, INF, 1e-9), "at least 0.01, at most 600"),
    ("heartbeat_timeout_s", (0, -1, NAN, INF), "at least 0.01"),
    ("heartbeat_timeout_s", (0.5,), "at least heartbeat_s, 1.0"),
    ("shutdown_grace_s", (-1, INF, NAN), "at least 0, at most 600"),
    ("context_policy", ("x",), "one of round_robin, least_loaded"),
]
CLUSTER_BOUNDS = [
    *((f"engine.{key}", values, limit) for key, values, limit in ENGINE_BOUNDS),
    ("context.engine.transfer.stall_ms", (0,), "at least 1"),
    ("engine.transfer.transport", ("inproc",), "ucx: inproc joins engines of one process"),
    ("context.count", (-1, 10**5), "at most 256"),
    ("context.count", (0,), "1 to 256, or router.disaggregation never"),
    ("generation.count", (0, -1, 10**5), "256"),
    ("context.first_port", (-1, 70_000), "at most 65535"),
    ("context.first_metrics_port", (-1, 70_000), "at most 65535"),
    ("context.host", ("",), "HOST:PORT"),
    ("start_timeout_s", (0, -1, NAN, INF), "over 0"),
    ("stop_timeout_s", (-1, NAN, INF), "at least 0"),
    ("shutdown_grace_s", (-1, NAN, INF), "at least 0, at most 600"),
    ("runtime_dir", ("",), "of length 1 or more"),
    ("router.listen", ("x",), "HOST:PORT"),
    ("router.max_in_flight", (0,), "at least 1"),
    ("router.default_deadline_s", (0, NAN, INF), "over 0"),
    ("router.context_policy", ("x",), "one of round_robin, least_loaded"),
]
MODEL = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
MODEL_BOUNDS = [
    ("num_hidden_layers", ("x", -1, 0, 1.5), "an integer from 1"),
    ("num_attention_heads", (0, None), "an integer from 1"),
    ("vocab_size", (0,), "an integer from 1"),
    ("rms_norm_eps", (-1, NAN, "x"), "a number over 0"),
    ("rope_theta", (-1, INF), "a number over 0"),
]


def cases(bounds: list[tuple[str, tuple[Any, ...], str]]) -> pytest.MarkDecorator:
    rows = [(key, value, limit) for key, values, limit in bounds for value in values]
    return pytest.mark.parametrize(("key", "value", "limit"), rows)


def nested(key: str, value: object) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


def refused(key: str, limit: str, load: Callable[[], object]) -> str:
    """One line that names the key (or its own in a role's file) and what it must be."""
    with pytest.raises(ConfigError, match=limit) as caught:
        load()
    message = caught.value.message
    assert key.rpartition(".")[2] in message
    assert "\n" not in message
    assert caught.value.field
    return message


@cases(SERVER_BOUNDS)
def test_a_server_refuses(key: str, value: object, limit: str) -> None:
    """A lease of 0 ms, a stall of -1 ms or an inproc transport failed every single request."""
    data = merge(SERVER, nested(key, value))
    assert key in refused(key, limit, lambda: parse_config(data, GenerationServerConfig, "a"))


@cases(ROUTER_BOUNDS)
def test_a_router_refuses(key: str, value: object, limit: str) -> None:
    """A server listed twice under two spellings got twice its load."""
    data = merge(ROUTER, nested(key, value))
    refused(key, limit, lambda: parse_config(data, RouterConfig, "a"))


@cases(CLUSTER_BOUNDS)
def test_up_refuses_before_a_process_starts(key: str, value: object, limit: str) -> None:
    """`baton up` started servers first, and then the router told that its value was bad."""
    data = merge(CLUSTER, nested(key, value))
    key = key if key != "context.host" else "listen"  # what the servers are given of it
    refused(key, limit, lambda: check_plans(parse_config(data, ClusterConfig, "a")))


@cases(MODEL_BOUNDS)
def test_a_model_refuses(key: str, value: object, limit: str) -> None:
    """Tracebacks, before: a division by zero, "invalid literal for int()"."""
    assert key in refused(key, limit, lambda: parse_hf({**MODEL, key: value}, (2,)))


def test_a_model_ends_by_a_token_it_has() -> None:
    refused("eos_token_id", "under vocab_size, 100", lambda: parse_hf(MODEL, (2, 100)))
    assert parse_hf(MODEL, (2, 99)).eos_token_ids == (2, 99)


@cases(ENGINE_BOUNDS)
def test_an_engine_refuses_what_no_file_told(key: str, value: object, limit: str) -> None:
    """Guards configurations that were built in Python, which no schema has seen."""
    section, _, name = key.rpartition(".")
    config = EngineConfig(model="/nowhere")
    changes = {name: value}
    if section:
        changes = {section: replace(getattr(config, section), **changes)}
    config = replace(config, **changes)
    refused(key, limit, lambda: create_engine(config, lambda: None))


def test_what_is_at_the_bounds_is_taken() -> None:
    engine = {
        "kv_cache": {"num_blocks": 1, "tokens_per_block": 2, "leased_share_max": 1},
        "transfer": {"stall_ms": 2, "heartbeat_ms": 1, "ucx_net_devices": "lo"},
        "scheduler": {"max_sequences": 1, "max_batch_tokens": 1, "prefill_chunk_tokens": 1},
        "max_total_tokens": 2,
        "served_model_name": "モデル 7B",
    }
    parse_config({**SERVER, "engine": engine}, GenerationServerConfig, "a")
    parse_config({**ROUTER, "disaggregation": "never", "context_servers": []}, RouterConfig, "a")
    parse_config({**ROUTER, "generation_servers": ["[::1]:1", "h:1", "h:2"]}, RouterConfig, "a")
    alone = {"context": {"count": 0}, "router": {"disaggregation": "never"}}
    check_plans(parse_config(alone, ClusterConfig, "a"))
