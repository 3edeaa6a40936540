"""What the doctor says about what it finds. Its probes run in tests of the whole command."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.app import app
from baton.doctor import host, libraries, probe
from baton.doctor.finding import Level


def test_an_old_python_is_a_problem_with_a_remedy() -> None:
    finding = host.check_python((3, 10, 1))
    assert finding.level is Level.PROBLEM
    assert "3.11" in finding.remedy
    assert host.check_python((3, 14, 0)).level is Level.OK


def test_every_ucx_variable_is_named_with_its_value() -> None:
    """UCX reads the environment by itself: a forgotten variable explains a slow cluster."""
    environ = {"UCX_TLS": "tcp", "UCX_WARN_UNUSED_ENV_VARS": "n", "PATH": "/bin", "UCX_X": "1"}
    findings = list(libraries.check_ucx_variables(environ))
    assert [finding.level for finding in findings] == [Level.WARNING] * 2
    assert findings[0].what.startswith("UCX_TLS=tcp is set")
    assert "unset UCX_TLS" in findings[0].remedy


def test_missing_shared_memory_is_a_warning() -> None:
    found = {"libucx": "1", "ucxx": "2", "tls": "tcp", "transports": ["self", "tcp"]}
    assert [item.level for item in libraries.check_ucx(found, "")] == [Level.OK, Level.WARNING]
    assert host.check_shared_memory(Path("/no/such")).level is Level.WARNING


def test_a_failed_probe_is_told_in_words() -> None:
    (finding,) = libraries.check_torch({}, "no answer within 30 s")
    assert finding.level is Level.PROBLEM
    assert "no answer" in finding.what
    assert libraries.check_mpi({}, "libmpi is missing").level is Level.WARNING


def test_a_gpu_is_named() -> None:
    found = {"version": "2", "num_threads": 1, "devices": ["H200"], "cuda_build": "13"}
    assert "H200" in [finding.what for finding in libraries.check_torch(found, "")][1]


def test_ptrace_scope_costs_cma(tmp_path: Path) -> None:
    scope = tmp_path / "scope"
    scope.write_text("1\n")
    assert host.check_ptrace(scope).level is Level.WARNING
    assert host.check_ptrace(tmp_path / "absent").level is Level.OK


def test_a_probe_is_bounded_and_its_failure_is_one_line() -> None:
    _, failure = probe.run_probe("torch", timeout_s=0.01)
    assert failure == "no answer within 0 s"
    _, failure = probe.run_probe("nonsense")
    assert failure == "KeyError: 'nonsense'"


def test_the_doctor_passes_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests can serve; and what is odd about it is named."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    done = CliRunner().invoke(app, ["doctor", "--runtime-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "UCX_TLS=tcp,self" in done.stdout
    assert "0 problem" in done.stdout
