"""Socket folders: one per process, gone with it, or soon after."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.scratch import ScratchFolder


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_private_and_goes_at_the_end(tmp_path: Path) -> None:
    folder = ScratchFolder("baton-x-")
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "socket").write_text("")
    for _ in range(2):
        folder.close()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    """A SIGKILL while loading left a folder in /tmp for ever."""
    script = (
        "import os, sys\n"
        "from common.scratch import ScratchFolder\n"
        "print(ScratchFolder('baton-x-').path, flush=True)\n"
        "if sys.argv[1] == 'die': os.kill(os.getpid(), 9)\n"
        "sys.stdin.read()\n"
    )

    def start(what: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    alive, alive_path = start("live")
    dead, dead_path = start("die")
    dead.communicate(timeout=10)
    assert dead_path.is_dir()
    mine = ScratchFolder("baton-x-")
    assert not dead_path.exists()
    assert alive_path.is_dir()
    alive.communicate(timeout=10)
    mine.close()


def test_others_files_are_left_alone(tmp_path: Path) -> None:
    """/tmp is shared: nothing behind a link, and no file, is ours to remove."""
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / "baton-x-link").symlink_to(target)
    (tmp_path / "baton-x-file").write_text("")
    (tmp_path / "baton-y-dir").mkdir()
    ScratchFolder("baton-x-").close()
    assert sorted(os.listdir(tmp_path)) == [
        "baton-x-file",
        "baton-x-link",
        "baton-y-dir",
        "precious",
    ]
