"""`scripts/soak executor` runs, and is not blind. The soak itself is for whoever has the time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak import __main__ as soak
from tests.soak import soak_executor, soak_load
from tests.soak.soak_owner import play_owner
from tests.support import executor_baseline

pytestmark = pytest.mark.system


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status."""
    monkeypatch.setattr(soak_executor, "NUM_CLIENTS", (100,))
    monkeypatch.setattr(sys, "argv", ["soak", "executor", "--minutes", "0.01", *arguments])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_short_soak_finds_nothing_and_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "soak.json", tmp_path / "soak.md"
    options = ("--seed", "1", "--form", "ipc", "--json", str(file), "--summary", str(page))
    assert run(monkeypatch, *options) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("seed 1\n")
    figures = json.loads(file.read_text())
    assert figures["forms"]["ipc"]["requests"] > 50
    assert figures["forms"]["ipc"]["deeds"] == {"rank kill": 1}
    assert figures["violations"] == []
    assert "| ipc | 1 |" in page.read_text()


def test_a_wrong_token_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a soak that would let anything pass."""
    honest = soak_load.completion

    def lie(prompt: Any, num_tokens: int) -> tuple[int, ...]:
        return (*honest(prompt, num_tokens)[:-1], 0)

    monkeypatch.setattr(soak_load, "completion", lie)
    assert run(monkeypatch, "--seed", "3", "--form", "single") == 1
    said = capsys.readouterr().out
    assert "another's tokens" in said
    assert "form single, seed 3" in said


def test_what_a_killed_owner_leaves_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards rounds in which the server itself dies, and nobody looks for its children."""
    left: list[subprocess.Popen[bytes]] = []

    async def leave_one(*arguments: Any) -> None:
        await play_owner(*arguments)
        left.append(await asyncio.to_thread(subprocess.Popen, ["/bin/sleep", "60"]))

    monkeypatch.setattr("tests.soak.soak_round.play_owner", leave_one)
    monkeypatch.setattr(executor_baseline, "SETTLE_S_MAX", 0.5)
    assert run(monkeypatch, "--seed", "12", "--form", "ipc") == 1
    said = capsys.readouterr().out
    assert "ipc seed 12: 0 requests, owner kill; VIOLATION" in said
    assert "left behind: processes: ['" in said
    assert "/bin/sleep 60" in said
    left[0].wait()
