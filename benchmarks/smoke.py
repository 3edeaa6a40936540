"""Area `smoke`: one figure for each part, on this machine, with the demo model.

Not a comparison: it shows at a glance whether a change made a part slower. The
areas of the later releases measure each part beside its peers.
"""

from __future__ import annotations

from benchmarks import smoke_engine, smoke_kv, smoke_router


def run(is_quick: bool) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for part in (smoke_engine, smoke_kv, smoke_router):
        metrics |= part.run(is_quick)
    return metrics
