"""The repository's own habits, checked: what no linter knows about this project."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "baton",
    "common",
    "context_server",
    "executor",
    "generation_server",
    "kv_transfer",
    "protos",
    "router",
    "serving",
)
PURE = (
    "executor/attach/broker_events.py",
    "executor/attach/broker_table.py",
    "executor/attach/keys.py",
    "executor/attach/messages.py",
    "serving/restarts.py",
    "executor/answer.py",
    "executor/ledger.py",
    "executor/world/events.py",
    "executor/world/table.py",
    "executor/post/desk.py",
    "executor/post/life.py",
    "executor/post/posted.py",
    "executor/post/watch.py",
    "executor/post/window.py",
    "executor/engine/scheduler.py",
    "executor/engine/kv_cache.py",
    "executor/engine/kv_events.py",
    "executor/engine/loras.py",
    "executor/engine/sequence.py",
    "kv_transfer/source_session.py",
    "kv_transfer/target_session.py",
    "kv_transfer/leases.py",
    "router/dispatch.py",
    "router/signals.py",
    "router/merge.py",
    "router/fleet.py",
    "router/servers.py",
    "router/admission.py",
    "router/policies/least_loaded.py",
    "router/policies/round_robin.py",
)
IMPURE_MODULES = {"asyncio", "socket", "grpc", "torch", "time", "threading", "zmq", "random"}
LINES_MAX = 450
ENVIRONMENT_READERS = {
    "kv_transfer/ucx_binding.py",
    "executor/child.py",
    "executor/world/outer.py",
    "executor/world/ray_agent.py",
}
"""One shields UCX from the environment, two pass it on to a worker, one asks MPI's and Slurm's
variables which rank this is; none takes settings from it. `baton/` may read it for the user."""


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_nothing_impure(name: str) -> None:
    assert not imported(ROOT / name) & IMPURE_MODULES


def test_no_pickle_and_no_leftovers() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    for path in sources():
        assert "pickle" not in imported(path), name_of(path)
        assert not marks.search(path.read_text()), name_of(path)


def test_every_file_says_what_it_is_for_and_stays_readable() -> None:
    for path in sources():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)} has no docstring"
        assert text.count("\n") <= LINES_MAX, f"{name_of(path)} is too long to read at once"


def test_the_environment_is_read_where_the_user_stands_and_nowhere_else() -> None:
    for path in sources():
        if path.is_relative_to(ROOT / "baton") or name_of(path) in ENVIRONMENT_READERS:
            continue
        assert "os.environ" not in path.read_text(), name_of(path)
        assert "getenv" not in path.read_text(), name_of(path)


def test_all_packages_come_from_one_root() -> None:
    """`common` and `protos` are common names: a stray one from elsewhere must not slip in."""
    code = f"import {', '.join(PACKAGES)}; print(*(m.__file__ for m in ({', '.join(PACKAGES)},)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {Path(file).parents[1] for file in done.stdout.split()} == {ROOT}


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


def expand(name: str) -> list[str]:
    """`a/{b,c}.py` as two names."""
    braces = re.search(r"\{([^}]*)\}", name)
    if braces is None:
        return [name]
    head, tail = name[: braces.start()], name[braces.end() :]
    return [f"{head}{choice.strip()}{tail}" for choice in braces.group(1).split(",")]


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_prose_names_only_files_that_are_there(document: Path) -> None:
    """`path/file.py` anywhere, or `file.py` beside a folder that the same line names."""
    text = document.read_text()
    for quoted in re.findall(r"`([\w{},./* -]+/[\w{},.* -]*)`", text):
        for name in expand(quoted.strip()):
            if name.split("/")[0] in (*PACKAGES, "scripts", "configs", "docs", "tests", "protos"):
                assert list(ROOT.glob(name.split()[0].rstrip("/"))), f"{name} in {document.name}"
