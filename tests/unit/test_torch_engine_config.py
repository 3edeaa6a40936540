"""A torch engine that cannot be made says what to change, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.config import EngineConfig, KvCacheConfig, SchedulerConfig
from executor.engine.attention.room import make_pool
from executor.engine.factory import create_engine
from protos.errors import ConfigError
from protos.messages import KvLayout


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (EngineConfig(model="/nowhere/model"), "model"),
        (EngineConfig(model=""), "model"),
        (EngineConfig(model="/nowhere", device="cuda:99"), "device"),
        (EngineConfig(model="/nowhere", device="abacus"), "device"),
        (
            EngineConfig(scheduler=SchedulerConfig(max_sequences=9, max_batch_tokens=8)),
            "scheduler.max_batch_tokens",
        ),
        (EngineConfig(scheduler=SchedulerConfig(max_queued=0)), "scheduler.max_queued"),
    ],
)
def test_a_configuration_that_cannot_work_is_named(config: EngineConfig, field: str) -> None:
    """Guards start-up: a wrong key ends with its name, not with a torch traceback."""
    with pytest.raises(ConfigError) as caught:
        create_engine(config, lambda: None)
    assert caught.value.field == field


def test_a_pool_without_room_is_refused(tmp_path: Path) -> None:
    """Guards against an engine that starts and can serve nothing."""
    for cache, field in (
        (KvCacheConfig(num_blocks=0), "kv_cache.num_blocks"),
        (KvCacheConfig(tokens_per_block=0), "kv_cache.tokens_per_block"),
        (KvCacheConfig(leased_share_max=1.5), "kv_cache.leased_share_max"),
    ):
        with pytest.raises(ConfigError) as caught:
            create_engine(EngineConfig(model=str(tmp_path), kv_cache=cache), lambda: None)
        assert caught.value.field == field


def test_a_pool_beyond_the_memory_is_told_in_bytes() -> None:
    """It was the allocator's traceback; or nothing, and later the kernel's out-of-memory kill."""
    layout = KvLayout(
        dtype="float32",
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        tokens_per_block=16,
        model_fingerprint="f",
    )
    with pytest.raises(ConfigError, match=r"it needs 4096000000000 bytes .* available") as caught:
        make_pool(10**9, layout, torch.device("cpu"))
    assert caught.value.field == "kv_cache.num_blocks"
    assert "\n" not in caught.value.message
    assert make_pool(2, layout, torch.device("cpu")).num_blocks == 2
