"""Commands that mpirun runs, with our entry or without: one line says what is wrong.

Found by a newcomer, who got tracebacks, or a line that was meant for a script's author.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executor.attach import worker_server
from executor.attach.worker_config import WorkerConfig
from generation_server.__main__ import main as generation_main
from serving.config import ServerConfig

WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None
from executor.world import under_mpi
sys.exit(under_mpi.main(["true"]))
"""


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_a_missing_mpi4py_is_one_line_of_the_job(rank: str, num_lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI],
        env={**os.environ, "PMI_RANK": rank, "PMI_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == num_lines, done.stderr
    assert ("pip install -e '.[mpi]'" in done.stderr) is (num_lines == 1)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("")
    text = f"name: a\nlisten: 127.0.0.1:0\nsecret_file: {tmp_path}/secret\n"
    (tmp_path / "worker.yaml").write_text(text)
    (tmp_path / "server.yaml").write_text(text + "metrics_listen: 127.0.0.1:0\n")
    return tmp_path


def test_a_rank_that_runs_the_command_itself_is_told_of_the_entry(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mpirun -n 2 baton context`: rank 0 hears of it by the choice of its launcher."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    for main, file in ((generation_main, "server.yaml"), (worker_server.main, "worker.yaml")):
        assert main(["--config", str(files / file)]) == 2
        said = capsys.readouterr().err
        assert "this is rank 1 of an outer job" in said
        assert "python -m executor.world.under_mpi COMMAND" in said
        assert said.count("\n") == 1


def test_a_worker_tells_a_servers_key_by_its_kind(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worker_server.main(["--config", str(files / "server.yaml")]) == 2
    said = capsys.readouterr().err
    assert "metrics_listen is a server's key; a worker takes name, listen, secret_file" in said
    assert said.count("\n") == 1


def test_the_keys_that_only_servers_have_are_known() -> None:
    theirs = set(ServerConfig.__struct_fields__) - set(WorkerConfig.__struct_fields__)
    assert theirs == set(worker_server.OF_SERVERS)
