"""From a cluster's YAML and flags to the configuration of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.launch.config import (
    ClusterConfig,
    Flags,
    PoolSection,
    RouterSection,
    merge,
    with_flags,
)
from baton.launch.plan import (
    ProcessPlan,
    check_plans,
    listen_addresses,
    plan_router,
    plan_servers,
)
from common.config import ConfigStruct, load_config, parse_config
from context_server.config import ContextServerConfig
from executor.attach.worker_config import WorkerConfig
from generation_server.config import GenerationServerConfig
from protos.errors import ConfigError
from router.config import RouterConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SECRET = Path("/run/secret")


def servers(config: ClusterConfig, num_cores: int = 8) -> tuple[ProcessPlan, ...]:
    return plan_servers(config, model="/m", secret_file=SECRET, num_cores=num_cores)


def router(config: ClusterConfig) -> ProcessPlan:
    return plan_router(
        config,
        model="/m",
        secret_file=SECRET,
        context_servers=["h:1"],
        generation_servers=["h:2"],
    )


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("local", ClusterConfig),
        ("router", RouterConfig),
        ("context", ContextServerConfig),
        ("generation", GenerationServerConfig),
        ("attached", GenerationServerConfig),
        ("worker", WorkerConfig),
    ],
)
def test_the_example_configurations_are_valid(name: str, schema: type[ConfigStruct]) -> None:
    load_config(CONFIGS / f"{name}.yaml", schema)


def test_the_example_says_the_defaults() -> None:
    """configs/local.yaml claims that its values are the defaults; keep that true."""
    config = load_config(CONFIGS / "local.yaml", ClusterConfig)
    assert [plan.config for plan in servers(config)] == [
        {**plan.config, "engine": merge(plan.config["engine"], config.engine)}
        for plan in servers(ClusterConfig())
    ]
    said = parse_config(dict(router(config).config), RouterConfig, "said")
    assert said == parse_config(dict(router(ClusterConfig()).config), RouterConfig, "default")


def test_what_the_launcher_writes_is_what_the_processes_read() -> None:
    schemas: dict[str, Any] = {
        "context_server": ContextServerConfig,
        "generation_server": GenerationServerConfig,
    }
    for plan in servers(ClusterConfig(context=PoolSection(count=2))):
        read = parse_config(dict(plan.config), schemas[plan.module], plan.name)
        assert (read.name, read.engine.model) == (plan.name, "/m")
    assert parse_config(dict(router(ClusterConfig()).config), RouterConfig, "router").model == "/m"


def test_frontends_have_metrics_ports_and_connections_of_their_own() -> None:
    pool = PoolSection(count=2, frontends=3, first_metrics_port=9000)
    config = ClusterConfig(generation=pool)
    plans = [plan.config for plan in servers(config) if plan.role == "generation"]
    assert [plan["frontends"] for plan in plans] == [3, 3]
    assert [plan["metrics_listen"][-4:] for plan in plans] == ["9000", "9003"]
    asked = [address for key, address in listen_addresses(config) if "metrics" in key]
    assert asked == [f"127.0.0.1:{port}" for port in range(9000, 9006)]
    assert router(config).config["connections_per_server"] == 12
    given = ClusterConfig(generation=pool, router=RouterSection(connections_per_server=2))
    assert router(given).config["connections_per_server"] == 2


def test_engines_share_the_cores() -> None:
    """Two engines with all of torch's threads each are slower than one."""
    plans = servers(ClusterConfig(context=PoolSection(count=2)), num_cores=8)
    assert [plan.config["engine"]["num_threads"] for plan in plans] == [2, 2, 2]
    assert servers(ClusterConfig(), num_cores=1)[0].config["engine"]["num_threads"] == 1
    given = ClusterConfig(engine={"num_threads": 5})
    assert servers(given)[0].config["engine"]["num_threads"] == 5


def test_a_roles_engine_keys_win_over_the_clusters() -> None:
    config = ClusterConfig(
        engine={"kv_cache": {"num_blocks": 9, "tokens_per_block": 8}},
        context=PoolSection(engine={"kv_cache": {"num_blocks": 5}}),
    )
    context, generation = servers(config)
    assert context.config["engine"]["kv_cache"] == {"num_blocks": 5, "tokens_per_block": 8}
    assert generation.config["engine"]["kv_cache"]["num_blocks"] == 9


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ClusterConfig(engine={"kv_cach": {}}), "did you mean 'kv_cache'"),
        (ClusterConfig(engine={"model": "x"}), "top level"),
        (ClusterConfig(context=PoolSection(count=-1)), "'context.count' is -1"),
        (ClusterConfig(generation=PoolSection(count=0)), "'generation.count' is 0"),
        (ClusterConfig(context=PoolSection(count=2, first_port=65_535)), "context.first_port"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config: ClusterConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_plans(parse_config(msgspec.to_builtins(config), ClusterConfig, "up.yaml"))


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'listen'"):
        parse_config({"router": {"listn": "a:1"}}, ClusterConfig, "up.yaml")


def test_flags_win_and_silence_changes_nothing() -> None:
    base = ClusterConfig(model="/a", router=RouterSection(listen="0.0.0.0:7", max_in_flight=3))
    assert with_flags(base, Flags()) == base
    flags = Flags(model="/b", num_context=2, port=9, ucx_tls="tcp,self", dtype="bfloat16")
    told = with_flags(base, flags)
    assert (told.model, told.context.count, told.generation.count) == ("/b", 2, 1)
    assert (told.router.listen, told.router.max_in_flight) == ("0.0.0.0:9", 3)
    assert told.engine == {"transfer": {"ucx_tls": "tcp,self"}}
    assert told.dtype == "bfloat16"


def test_a_flag_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="float8"):
        with_flags(ClusterConfig(), Flags(dtype="float8"))


def test_ports_count_up_from_the_first() -> None:
    config = ClusterConfig(context=PoolSection(count=2, first_port=8101, first_metrics_port=9101))
    assert listen_addresses(config) == (
        ("router.listen", "127.0.0.1:8000"),
        ("context.first_port", "127.0.0.1:8101"),
        ("context.first_metrics_port", "127.0.0.1:9101"),
        ("context.first_port", "127.0.0.1:8102"),
        ("context.first_metrics_port", "127.0.0.1:9102"),
        ("generation.first_port", "127.0.0.1:0"),
    )
