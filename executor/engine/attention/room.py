"""Memory for the KV pool, asked for before it is taken.

Linux hands out more than there is and kills later, so the question is worth its while.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from common.config_checks import refusal
from executor.engine.attention.pool import KvPool
from protos.messages import KvLayout

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def make_pool(num_blocks: int, layout: KvLayout, device: torch.device) -> KvPool:
    """Raises ConfigError, in bytes needed and available, where the pool does not fit."""
    needed, available = num_blocks * layout.block_bytes, available_bytes(device)
    limit = f"less: it needs {_shown(needed)} of memory, and {_shown(available)} are available"
    if needed > available:
        raise refusal("kv_cache.num_blocks", num_blocks, limit)
    try:
        return KvPool(num_blocks, layout, device)
    except (RuntimeError, MemoryError) as error:
        raise refusal("kv_cache.num_blocks", num_blocks, limit) from error


def available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    assert found is not None, "Linux has said so since 3.14"
    return min(int(found[1]) * 1024, _left_in_container())


def _left_in_container() -> int:
    """What the container's limit leaves; as good as endless where there is none."""
    try:
        limit = (_CONTAINER / "memory.max").read_text().strip()
        used = (_CONTAINER / "memory.current").read_text().strip()
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(int(limit) - int(used), 0)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / (1 << 30):.1f} GiB)"
