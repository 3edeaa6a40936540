"""A rank without an engine: it keeps the world's books and answers for its own process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from executor.engine.control import Deferred, Method, RankFacts, call_method
from executor.engine.loras import LORAS_MAX, LoraBook
from executor.engine.member import MemberControl, rank_path
from executor.engine.profiles import Profiles, StepTracer
from protos.errors import InvalidRequestError, ModelNotFoundError, NotNowError, OverloadedError


@pytest.fixture
def methods() -> Mapping[str, Method]:
    return MemberControl(RankFacts(rank=2, engine="scripted", device="none")).methods()


def call(methods: Mapping[str, Method], method: str, /, **arguments: Any) -> Any:
    result = call_method(methods, method, arguments)
    return result.finish() if isinstance(result, Deferred) else result


def test_a_member_answers_every_coordinated_call(
    methods: Mapping[str, Method], tmp_path: Path
) -> None:
    """Guards a world's calls: one rank that does not know one would fail it for all."""
    call(methods, "sleep")
    facts = call(methods, "describe")
    assert (facts["rank"], facts["pid"], facts["is_asleep"]) == (2, os.getpid(), True)
    call(methods, "wake_up")
    assert not call(methods, "describe")["is_asleep"]
    call(methods, "load_lora", name="a", path="/a")
    assert call(methods, "list_loras") == [{"name": "a", "path": "/a"}]
    call(methods, "unload_lora", name="a")
    with pytest.raises(ModelNotFoundError):
        call(methods, "unload_lora", name="a")
    call(methods, "start_profile", path=str(tmp_path / "t.json"))
    with pytest.raises(NotNowError):
        call(methods, "start_profile", path=str(tmp_path / "t.json"))
    done = call(methods, "stop_profile")
    assert done["path"] == str(tmp_path / "t.rank2.json")
    assert json.loads(Path(done["path"]).read_text())["traceEvents"] == []
    call(methods, "reset_counters")
    with pytest.raises(InvalidRequestError):
        call(methods, "reset_counters", hard=True)


@pytest.mark.parametrize(
    ("path", "its_own"),
    [
        ("/a/t.json", "/a/t.rank1.json"),
        ("/a.b/t.json.gz", "/a.b/t.rank1.json.gz"),
        ("/t", "/t.rank1"),
    ],
)
def test_each_rank_has_a_trace_file_of_its_own(path: str, its_own: str) -> None:
    assert rank_path(path, 1) == its_own


def test_the_book_of_adapters_is_bounded() -> None:
    book = LoraBook()
    for number in range(LORAS_MAX):
        book.load(str(number), "/a")
    with pytest.raises(OverloadedError):
        book.load("one too many", "/a")


def test_a_full_profile_records_no_more(tmp_path: Path) -> None:
    """Guards memory: a profile that nobody stops ends by itself and is still written."""
    profiles = Profiles(StepTracer("x", steps_max=3))
    profiles.start(str(tmp_path / "t"))
    for second in range(5):
        profiles.on_step(second, second + 0.5, 1)
        assert profiles.is_recording == (second < 2)
    export = profiles.stop()
    assert export.num_steps == 3
    export.write()
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert [(event["ts"], event["dur"]) for event in events] == [
        (0.0, 500_000.0),
        (1_000_000.0, 500_000.0),
        (2_000_000.0, 500_000.0),
    ]
    assert not profiles.is_recording
    profiles.close()
