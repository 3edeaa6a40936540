"""What an engine refuses before it harms anybody: paths of profiles, pools, devices, few files."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path

import pytest

from executor.config import EngineConfig
from executor.engine.control import RankFacts
from executor.engine.member import MemberControl
from executor.engine.profiles import NAME_BYTES_MAX, Profiles, StepTracer
from executor.engine.scripted_pool import ScriptedPool
from executor.preflight import FREE_FILES_MIN, OPEN_FILES_MIN, check_open_files
from protos.errors import ConfigError, InvalidRequestError, from_data


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/" + "a" * 300,
        "/tmp/" + "ä" * 120,
        "/tmp/b\udc80",
        "/etc/passwd/x",
        "/" + "a" * 300 + "/x",
    ],
)
def test_a_path_that_the_system_refuses_is_the_callers_fault(path: str) -> None:
    """Bug: OSError, PermissionError or ValueError escaped and ended the engine."""
    with pytest.raises(InvalidRequestError) as refused:
        Profiles(StepTracer("x")).start(path)
    assert refused.value.field == "path"
    data = refused.value.to_data()
    assert "\udc80" not in data.message + data.value
    assert from_data(data).message == data.message


def test_a_name_that_the_leader_takes_a_member_takes_and_it_can_be_written(tmp_path: Path) -> None:
    """Guards: rank 0 records, and rank 1 finds that its own longer name is refused."""
    path = str(tmp_path / ("a" * NAME_BYTES_MAX))
    leader, member = Profiles(StepTracer("x")), MemberControl(RankFacts(1023, "scripted", "none"))
    leader.start(path)
    member.start_profile(path)
    assert leader.stop().write() > 0
    assert member.stop_profile().write() > 0


def test_a_pool_takes_memory_for_what_is_used_of_it() -> None:
    """Bug: the free list of the largest pool that the configuration takes was 80 GB."""
    tracemalloc.start()
    try:
        pool = ScriptedPool((1 << 31) - 1, 0.75)
        first = pool.take(3, "sequence:1")
        pool.give_back(first[:2])
        assert pool.take(3, "sequence:2") == (*first[:2], 3)
        assert pool.num_free == (1 << 31) - 1 - 4
        pool.check()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_scripted_engine_takes_no_device_that_it_does_not_use() -> None:
    """Bug: it served on "tpu:9"."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(engine="scripted", device="tpu:9").check("engine.")
    assert refused.value.field == "engine.device"


def test_files_that_are_nearly_all_open_are_told_before_zmq_aborts() -> None:
    """Bug: the limit alone was looked at; where most was in use, zmq's own error came, its
    context was left open, or it aborted the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MIN, hard))
    held: list[int] = []
    try:
        held += [os.dup(2) for _ in range(OPEN_FILES_MIN - FREE_FILES_MIN)]
        with pytest.raises(ConfigError, match="at least 64 must be free: ulimit -n"):
            check_open_files()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files_are_told_before_zmq_aborts() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MIN - 1, hard))
    try:
        with pytest.raises(ConfigError, match="ulimit -n 4096"):
            check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
