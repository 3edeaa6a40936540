"""A value that cannot work ends a real process with status 2 and one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.security import create_secret
from tests.support.cli_up import baton, write_cluster

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: {transfer: {lease_ms: 0}}", "'engine.transfer.lease_ms' is 0; it must be"),
        ("engine: {transfer: {transport: inproc}}", "'engine.transfer.transport' is 'inproc'"),
        ("engine: {default_deadline_s: .nan}", "'engine.default_deadline_s' is nan; it must be"),
        ('name: "a\\nb"', "'name' is 'a\\nb'; it must be"),
        ("name: a\nname: b", "key 'name' is given twice"),
        ("name: a\nname: \xff", "is not UTF-8 text: byte 14 is 0xff"),
        ("name: 2026-99-99", "is not valid YAML"),
    ],
)
def test_a_server_refuses_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    create_secret(tmp_path / "secret")
    file = tmp_path / "server.yaml"
    file.write_bytes(f"{text}\nsecret_file: {tmp_path}/secret\n".encode("latin-1"))
    done = subprocess.run(
        [sys.executable, "-m", "generation_server", "--config", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    "over",
    [
        {"start_timeout_s": float("nan")},
        {"engine": {"transfer": {"stall_ms": 0}}},
        {"router": {"max_in_flight": 0}},
        {"context": {"count": 0}},
    ],
    ids=lambda over: "-".join(over),
)
def test_up_refuses_before_anything_is_started(tmp_path: Path, over: dict[str, object]) -> None:
    done = baton("up", "--config", str(write_cluster(tmp_path, **over)))
    assert done.returncode == 2, done.stderr
    assert next(iter(over)) in done.stderr
    assert done.stderr.count("\n") == 1
    assert "starting" not in done.stdout
    assert "run" not in os.listdir(tmp_path)
