"""The contract of `Engine.control`, for every implementation (control_seam.py)."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.hashing import block_hashes, root_hash
from executor.engine.control import Deferred, call_method
from executor.engine.control_seam import KvCleared, KvEvent, KvRemoved, KvStored, TraceExport
from executor.engine.local import LocalExtras
from protos.errors import (
    BatonError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    NotNowError,
    RequestFailedError,
    Severity,
    UnsupportedError,
)
from protos.messages import DisaggRequestId, RequestType
from protos.tokens import pack_token_ids
from tests.support.engine_bench import PROMPT, Bench, open_bench
from tests.support.engine_models import save_checkpoint

LONG_PROMPT = tuple(range(3, 3 + 27))
"""Three full blocks of 8 and a part of a fourth."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["torch", "scripted"])
def bench(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Bench]:
    with open_bench(request.param, checkpoint) as made:
        yield made


def is_scripted(bench: Bench) -> bool:
    return bench.engine.identity.transport == "scripted"


def refused(kind: type[BatonError], call: Callable[[], object]) -> BatonError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.severity is Severity.REQUEST
    return caught.value


# --- sleep ------------------------------------------------------------------


def test_a_sleeping_engine_refuses_and_wakes_up_the_same(bench: Bench) -> None:
    """Guards sleep: nothing served meanwhile, the same tokens after, twice is once."""
    control = bench.engine.control
    bench.submit(1, max_tokens=6)
    bench.run()
    assert not control.is_asleep
    control.wake_up()
    for _ in range(2):
        control.sleep()
        assert control.is_asleep
    error = refused(NotNowError, lambda: bench.submit(2))
    assert "asleep" in error.message
    assert not bench.engine.has_work()
    assert bench.engine.step() == []
    assert bench.engine.audit().counters["is_asleep"] == 1
    progress = bench.engine.progress
    for _ in range(2):
        control.wake_up()
        assert not control.is_asleep
    assert bench.engine.progress >= progress
    bench.submit(3, max_tokens=6)
    bench.run()
    assert bench.tokens(3) == bench.tokens(1)
    bench.rest()


def test_sleep_is_refused_by_the_name_of_what_holds_on(bench: Bench) -> None:
    """Guards running, waiting and leased work against an engine that falls asleep under it."""
    control = bench.engine.control
    bench.submit(1, max_tokens=3)
    assert "sequence:1" in refused(NotNowError, control.sleep).message
    bench.step()
    assert "sequence:1" in refused(NotNowError, control.sleep).message
    bench.run()
    disagg_id = DisaggRequestId(7, 9, 0)
    bench.submit(2, request_type=RequestType.CONTEXT_ONLY, disagg_id=disagg_id, max_tokens=1)
    bench.run()
    assert f"lease:{disagg_id}" in refused(NotNowError, control.sleep).message
    assert not control.is_asleep
    bench.rest()
    control.sleep()
    assert control.is_asleep


# --- profiles ---------------------------------------------------------------


def written(export: TraceExport) -> int:
    """On another thread, as the worker does it."""
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(export.write()))
    thread.start()
    thread.join()
    return sizes[0]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_profile_becomes_a_trace_file(bench: Bench, tmp_path: Path, name: str) -> None:
    """Guards the file: steps inside, written by another thread, nothing beside it."""
    control, path = bench.engine.control, tmp_path / name
    control.start_profile(str(path))
    bench.submit(1, max_tokens=3)
    bench.run()
    export = control.stop_profile()
    assert list(tmp_path.iterdir()) == [], "the loop's thread writes nothing"
    # The next one may begin before the last one is written.
    control.start_profile(str(tmp_path / "next"))
    assert written(export) == path.stat().st_size
    assert export.num_steps >= 3
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert len(spans) >= 3
    assert written(control.stop_profile()) > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["next", name])


def test_profiles_that_cannot_be_are_refused(bench: Bench, tmp_path: Path) -> None:
    control, path = bench.engine.control, str(tmp_path / "trace.json")
    refused(NotNowError, control.stop_profile)
    for bad in ("trace.json", "/nowhere/at/all/trace.json", str(tmp_path), "", f"{tmp_path}/\0"):
        error = refused(InvalidRequestError, lambda bad=bad: control.start_profile(bad))  # type: ignore[misc]
        assert error.field == "path"
    control.start_profile(path)
    assert path in refused(NotNowError, lambda: control.start_profile(path)).message
    export = control.stop_profile()
    refused(NotNowError, control.stop_profile)
    tmp_path.joinpath("trace.json").mkdir()
    refused(RequestFailedError, export.write)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_a_profile_that_nobody_stops_ends_in_time(bench: Bench, tmp_path: Path) -> None:
    """Bug: a client that was killed between start and stop kept every later profile out until
    the engine was started anew. An idle engine must end it too, so it must ask to be stepped."""
    control, path = bench.engine.control, tmp_path / "trace.json"
    for bad in (0.0, -1.0, 901.0, float("nan")):
        error = refused(InvalidRequestError, lambda bad=bad: control.start_profile(str(path), bad))  # type: ignore[misc]
        assert error.field == "max_s"
    control.start_profile(str(path), 2.0)
    bench.submit(1, max_tokens=3)
    bench.run()
    due_s = bench.engine.next_deadline_s()
    assert due_s is not None
    assert due_s <= 2.0
    time.sleep(due_s)
    assert bench.engine.has_work()
    bench.engine.step()
    assert not bench.engine.has_work()
    assert bench.engine.next_deadline_s() is None
    export = control.stop_profile()
    assert export.num_steps >= 3
    assert written(export) == path.stat().st_size
    refused(NotNowError, control.stop_profile)
    control.start_profile(str(path), 0.01)
    time.sleep(0.01)
    bench.engine.step()
    control.start_profile(str(path), 1.0)  # nobody had to ask for the one before
    control.drop_profile(str(path))


# --- LoRA -------------------------------------------------------------------


def test_lora_books_are_kept_or_refused(bench: Bench) -> None:
    control = bench.engine.control
    if not is_scripted(bench):
        refused(UnsupportedError, lambda: control.load_lora("a", "/a"))
        refused(UnsupportedError, lambda: control.unload_lora("a"))
        assert control.list_loras() == ()
        return
    control.load_lora("a", "/a")
    control.load_lora("b", "/b")
    refused(DuplicateRequestError, lambda: control.load_lora("a", "/other"))
    refused(InvalidRequestError, lambda: control.load_lora("", "/other"))
    refused(ModelNotFoundError, lambda: control.unload_lora("c"))
    assert [(lora.name, lora.path) for lora in control.list_loras()] == [("a", "/a"), ("b", "/b")]
    control.unload_lora("a")
    assert [lora.name for lora in control.list_loras()] == ["b"]


# --- statistics and events --------------------------------------------------


def test_nothing_is_built_while_nobody_listens(bench: Bench) -> None:
    """Guards the quiet case's cost: the counters of what was built stay at zero."""
    bench.submit(1, prompt=LONG_PROMPT)
    bench.run()
    control, counters = bench.engine.control, bench.engine.audit().counters
    assert (counters["stats_built"], counters["kv_events_built"]) == (0, 0)
    assert control.take_stats() is None
    assert control.take_kv_events() == ()
    control.listen(stats=True, kv_events=True)
    bench.submit(2, prompt=(99, *LONG_PROMPT))
    bench.run()
    counters = bench.engine.audit().counters
    assert counters["stats_built"] > 0
    assert counters["kv_events_built"] > 0
    control.listen(stats=False, kv_events=False)
    assert control.take_stats() is None
    assert control.take_kv_events() == ()
    bench.submit(3, prompt=(98, *LONG_PROMPT))
    bench.run()
    after = bench.engine.audit().counters
    assert after["stats_built"] == counters["stats_built"]
    assert after["kv_events_built"] == counters["kv_events_built"]


def test_statistics_tell_of_the_last_step_once(bench: Bench) -> None:
    control = bench.engine.control
    control.listen(stats=True, kv_events=False)
    bench.submit(1, prompt=LONG_PROMPT, max_tokens=2)
    bench.step()
    first = control.take_stats()
    assert first is not None
    assert (first.num_prefill_tokens, first.num_decode_tokens) == (len(LONG_PROMPT), 0)
    assert (first.num_running, first.num_queued, first.num_finished) == (1, 0, 0)
    assert first.blocks_free < first.blocks_total
    assert first.step_ms > 0
    assert control.take_stats() is None
    bench.step()
    second = control.take_stats()
    assert second is not None
    assert second.step_index == first.step_index + 1
    assert (second.num_prefill_tokens, second.num_decode_tokens) == (0, 1)
    assert (second.num_running, second.num_finished) == (0, 1)
    assert second.blocks_free == second.blocks_total


def replayed(stored: set[bytes], events: tuple[KvEvent, ...], after: int) -> set[bytes]:
    """What a listener believes who knew `stored` as of the number `after`."""
    last = after
    for event in events:
        if event.sequence <= after:
            continue
        assert event.sequence == last + 1, "a gap"
        last = event.sequence
        match event:
            case KvStored():
                stored |= set(event.block_hashes)
            case KvRemoved():
                stored -= set(event.block_hashes)
            case KvCleared():
                stored = set()
    return stored


def test_events_and_snapshots_tell_the_same_story(bench: Bench) -> None:
    """Guards a listener who comes in the middle: snapshot, then events behind its number."""
    control, layout = bench.engine.control, bench.engine.identity.layout
    bench.submit(1, prompt=LONG_PROMPT, max_tokens=40)
    bench.step()
    control.listen(stats=False, kv_events=True)
    bench.submit(2, prompt=(50, *LONG_PROMPT), max_tokens=3)
    bench.step()
    middle = control.kv_snapshot()
    bench.submit(3, prompt=(*LONG_PROMPT, 60, 61, 62, 63, 64, 65, 66, 67), max_tokens=3)
    bench.run()
    bench.submit(4, prompt=(70, *LONG_PROMPT), max_tokens=3)
    bench.step()
    events = control.take_kv_events()
    stored = replayed(set(middle.block_hashes), events, middle.sequence)
    assert stored == set(control.kv_snapshot().block_hashes)
    root = root_hash(layout.model_fingerprint)
    hashes = block_hashes(pack_token_ids((70, *LONG_PROMPT)), layout.tokens_per_block, root)
    assert set(hashes) <= stored
    told = [e for e in events if isinstance(e, KvStored) and e.parent_hash == root][-1]
    assert told.block_hashes == hashes
    assert told.num_tokens == len(hashes) * layout.tokens_per_block
    bench.run()
    control.sleep()
    later = control.take_kv_events()
    assert replayed(stored, later, events[-1].sequence) == set()
    assert control.kv_snapshot().block_hashes == ()


def test_a_listener_who_comes_back_sees_that_it_missed_something(bench: Bench) -> None:
    control = bench.engine.control
    control.listen(stats=False, kv_events=True)
    bench.submit(1, prompt=LONG_PROMPT)
    bench.run()
    last = control.take_kv_events()[-1].sequence
    control.listen(stats=False, kv_events=False)
    bench.submit(2, prompt=(50, *LONG_PROMPT))
    bench.run()
    control.listen(stats=False, kv_events=True)
    bench.submit(3, prompt=(51, *LONG_PROMPT))
    bench.run()
    assert control.take_kv_events()[0].sequence > last + 1


# --- calls by name ----------------------------------------------------------


def call(bench: Bench, name: str, **arguments: Any) -> Any:
    """As over a wire: what crosses must be plain data."""
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))
    result = call_method(bench.engine.control.methods(), name, crossed)
    value = result.finish() if isinstance(result, Deferred) else result
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def test_calls_by_name_do_what_the_methods_do(bench: Bench, tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    assert call(bench, "sleep") is None
    assert call(bench, "describe")["is_asleep"] is True
    assert call(bench, "wake_up") is None
    facts = call(bench, "describe")
    assert (facts["rank"], facts["is_asleep"]) == (0, False)
    assert facts["rss_bytes"] > 1 << 20
    assert call(bench, "list_loras") == []
    call(bench, "start_profile", path=path)
    bench.submit(1)
    bench.run()
    done = call(bench, "stop_profile")
    assert done["path"] == path
    assert done["bytes"] == Path(path).stat().st_size
    before = bench.engine.audit().counters
    progress, load = bench.engine.progress, bench.engine.load()
    assert before["submitted"] == 1
    call(bench, "reset_counters")
    assert bench.engine.audit().counters.get("submitted", 0) == 0
    assert bench.engine.progress == progress
    assert bench.engine.load().sequence > load.sequence
    coordinated = [m.name for m in bench.engine.control.methods().values() if m.is_coordinated]
    assert coordinated == [
        "sleep",
        "wake_up",
        "start_profile",
        "stop_profile",
        "drop_profile",
        "load_lora",
        "unload_lora",
        "check_transport",
    ]


def test_calls_that_cannot_be_name_the_method_and_the_argument(bench: Bench) -> None:
    """Guards the table: nothing else of an engine can be reached by a name."""
    for name in ("close", "__init__", "take_stats", ""):
        error = refused(InvalidRequestError, lambda name=name: call(bench, name))  # type: ignore[misc]
        assert error.field == "method"
        assert error.value == name
    for arguments, field in (
        ({}, "start_profile.path"),
        ({"path": 3}, "start_profile.path"),
        ({"path": "/a", "more": 1}, "start_profile.more"),
    ):
        error = refused(InvalidRequestError, lambda a=arguments: call(bench, "start_profile", **a))  # type: ignore[misc]
        assert error.field == field
        assert "start_profile" in error.message


def test_logits_come_from_a_model_alone(bench: Bench) -> None:
    """Guards against asking in vain: an engine without logits says so, by field."""
    if not is_scripted(bench):
        bench.submit(1, context_logits=True, generation_logits=True, max_tokens=1)
        bench.run()
        local = bench.outputs[1][-1].local
        assert local is not None
        assert local.context_logits is not None
        assert local.context_logits.shape == (len(PROMPT), 128)
        return
    for arguments, field in (
        ({"context_logits": True}, "return_context_logits"),
        ({"generation_logits": True}, "return_generation_logits"),
        ({"local": LocalExtras(logits_processor=lambda _ids, v: v)}, "logits_processor"),
    ):
        error = refused(UnsupportedError, lambda a=arguments: bench.submit(1, **a))  # type: ignore[misc]
        assert error.field == field
