"""`scripts/bench executor` runs to its end and names what it promises; speed is not tested."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import executor, executor_streams
from benchmarks.executor_load import Span
from benchmarks.executor_plan import Plan

pytestmark = pytest.mark.system
PROMISED = (
    "cpu_us_per_token_64",
    "bare_loop_cpu_us_per_token_64",
    "added_p50_us_64",
    "added_p99_us_64",
    "tokens_per_s_1",
    "request_bytes_32k_prompt",
    "cpu_ratio_idle_1024",
)


def test_the_area_runs_and_writes_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a benchmark that the executor's next change breaks unseen."""
    plan = Plan(num_rounds=1, span=Span(warm_up_s=0.05, half_s=0.05), num_requests=4)
    monkeypatch.setattr(executor, "QUICK", plan)
    monkeypatch.setattr(executor_streams, "STREAMS", (1, 64))  # 1,024 take their time
    file = tmp_path / "metrics.json"
    monkeypatch.setattr(sys, "argv", ["bench", "executor", "--quick", "--json", str(file)])
    bench.main()
    metrics = json.loads(file.read_text())
    assert set(PROMISED) <= set(metrics)
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert metrics["request_bytes_32k_prompt"] >= 4 * 32 * 1024
    readme = (Path(executor.__file__).parent / "README.md").read_text()
    assert [name for name in metrics if f"`{name}`" not in readme] == []
