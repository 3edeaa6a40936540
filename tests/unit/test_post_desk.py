"""The postprocess worker's table, without a process around it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from executor.engine.seam import EngineFinish, EngineOutput
from executor.messages import Outputs
from executor.post.desk import Desk
from executor.post.grouping import divided
from executor.post.messages import (
    Answer,
    Lease,
    Orphan,
    Work,
    bucket_of,
    pack_outputs,
    unpack_outputs,
)
from executor.post.packing import packed_answers
from executor.post.spec import TokenizerSpec
from executor.postprocess import text_params
from protos.errors import ConfigError, RequestCancelledError
from protos.messages import ContextPhaseParams, FinishReason, Usage
from tests.support.executor_scripted import CharTokenizer, context_request, request
from tests.support.serving_double import hand_off

TOY = CharTokenizer()
USAGE = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=9)


def tokens(client_id: int, index: int, *ids: int) -> EngineOutput:
    return EngineOutput(request_id=client_id, token_index=index, token_ids=ids)


def last(client_id: int, index: int, *ids: int, params: ContextPhaseParams | None = None) -> bytes:
    reason = FinishReason.LENGTH if params is None else FinishReason.CONTEXT
    finish = EngineFinish(reason=reason, usage=USAGE, context_phase_params=params)
    output = EngineOutput(request_id=client_id, token_index=index, token_ids=ids, finish=finish)
    return pack_outputs([output])


class Bench:
    def __init__(self) -> None:
        self.desk = Desk(TOY)
        self._number = 0

    def open(self, client_id: int, *payloads: bytes, stop: tuple[str, ...] = ()) -> Answer:
        params = text_params(request(stop=stop), TOY)
        return self._handle(((client_id, params),), (), payloads)

    def push(self, *payloads: bytes, forgotten: tuple[int, ...] = ()) -> Answer:
        return self._handle((), forgotten, payloads)

    def _handle(self, opened, forgotten, payloads) -> Answer:  # type: ignore[no-untyped-def]
        self._number += 1
        answer = self.desk.handle(Work(self._number, opened, forgotten, payloads))
        assert answer.number == self._number
        self.desk.check()
        return answer


def test_one_answer_holds_all_chunks_in_order_and_the_last_word_empties_the_table() -> None:
    bench = Bench()
    bench.open(1)
    bench.open(2)
    answer = bench.push(pack_outputs([tokens(1, 0, 5), tokens(2, 0, 6)]), last(1, 1, 7))
    told = [(c.client_id, c.token_index, c.text, c.finish is not None) for c in answer.chunks]
    assert told == [
        (1, 0, TOY.decode([5]), False),
        (2, 0, TOY.decode([6]), False),
        (1, 1, TOY.decode([7]), True),
    ]
    assert (len(bench.desk), answer.counts.live) == (1, 1)


def test_a_stop_string_is_told_at_once_and_ends_by_the_engines_last_word() -> None:
    """Guards: an engine that runs on unseen, and tokens after the stop that reach anybody."""
    bench = Bench()
    stop = TOY.decode([6, 7])
    first = bench.open(1, pack_outputs([tokens(1, 0, 5, 6)]), stop=(stop,)).chunks[0]
    assert (first.text, first.stop_string) == (TOY.decode([5]), "")
    found = bench.push(pack_outputs([tokens(1, 2, 7, 8, 9)])).chunks[0]
    assert (found.token_ids, found.text) == ((7,), "")
    assert (found.stop_string, found.finish) == (stop, None)
    assert bench.push(pack_outputs([tokens(1, 5, 10)])).chunks == ()
    answer = bench.push(last(1, 6, 11))
    end = answer.chunks[0]
    assert end.finish is not None
    assert (end.finish.reason, end.stop_string) == (FinishReason.STOP, stop)
    assert end.finish.usage.completion_tokens == 3
    assert answer.num_dropped_tokens == 4
    assert len(bench.desk) == 0


def test_a_stop_string_in_a_context_phase_hands_back_its_lease() -> None:
    bench = Bench()
    params = hand_off(context_request("c", (1, 2, 3)), 9)
    bench.open(1, stop=(TOY.decode([9]),))
    answer = bench.push(last(1, 0, 9, params=params))
    assert answer.leases == (Lease(params.disagg_request_id, params.pull_token),)
    assert answer.chunks[0].finish is not None
    assert answer.chunks[0].finish.context_phase_params is None


def test_what_is_forgotten_is_late_and_its_lease_is_told() -> None:
    """Guards: a table that grows with every cancelled request; a lease nobody knows."""
    bench = Bench()
    params = hand_off(context_request("c", (1, 2, 3)), 9)
    bench.open(1, pack_outputs([tokens(1, 0, 5)]))
    answer = bench.push(last(1, 1, 9, params=params), forgotten=(1, 1, 99))
    assert (answer.chunks, answer.counts.late, answer.counts.live) == ((), 1, 0)
    lease = Lease(params.disagg_request_id, params.pull_token)
    assert answer.orphans == (Orphan(1, lease),)


class Broken(CharTokenizer):
    def decode(self, token_ids: Sequence[int]) -> str:
        if 666 in token_ids:
            raise IndexError("no such id")
        return super().decode(token_ids)


def test_a_defect_fails_one_request_and_no_other() -> None:
    """Guards: one request's bad id that ends the process, and with it its whole bucket."""
    bench = Bench()
    bench.desk = Desk(Broken())
    bench.open(1)
    bench.open(2)
    answer = bench.push(pack_outputs([tokens(1, 0, 666), tokens(2, 0, 5)]))
    ((client_id, error),) = answer.failed
    assert (client_id, error.kind) == (1, "RequestFailedError")
    assert "no such id" in error.message
    assert [chunk.client_id for chunk in answer.chunks] == [2]


def test_an_answer_that_is_too_large_costs_its_request_alone() -> None:
    """Bug: a frame over the bound cut the connection, and with it the whole bucket. What one
    request has to say and no message can hold is that request's failure; the rest is split."""
    bench = Bench()
    for client_id in range(1, 5):
        bench.open(client_id)
    params = hand_off(context_request("c", (1, 2, 3)), 9)
    outputs = [tokens(client_id, 0, *range(8)) for client_id in (1, 2, 3)]
    answer = bench.push(pack_outputs(outputs), last(4, 0, *range(900), params=params))
    bodies = packed_answers(answer, bytes_max=400)
    assert all(len(bytes(body)) <= 400 for body in bodies)
    parts = [msgspec.msgpack.decode(body, type=Answer) for body in bodies]
    assert [part.is_part for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [chunk.client_id for part in parts for chunk in part.chunks] == [1, 2, 3]
    ((client_id, error),) = [failed for part in parts for failed in part.failed]
    assert (client_id, error.kind, error.limit) == (4, "RequestFailedError", "400 bytes")
    (lease,) = [lease for part in parts for lease in part.leases]
    assert lease == Lease(params.disagg_request_id, params.pull_token)


def test_outputs_of_another_version_are_counted() -> None:
    bench = Bench()
    bench.open(1)
    answer = bench.push(b"\xc1", pack_outputs([tokens(1, 0, 5)]))
    assert answer.counts.malformed == 1
    assert len(answer.chunks) == 1


def test_a_step_is_divided_by_bucket_in_order_and_errors_stay_beside() -> None:
    """Guards: an error that waits behind text, or goes where nobody can end its request."""
    error = RequestCancelledError("no").to_data()
    said = (tokens(4, 0, 1), tokens(5, 0, 2), EngineOutput(request_id=6, error=error))
    message = divided(Outputs((9,), (*said, tokens(4, 1, 3))), num_buckets=2)
    assert (message.accepted, message.outputs) == ((9,), (said[2],))
    groups = {bucket: unpack_outputs(payload) for bucket, payload in message.buckets}
    assert groups == {0: (tokens(4, 0, 1), tokens(4, 1, 3)), 1: (tokens(5, 0, 2),)}


def test_a_request_always_has_the_same_bucket() -> None:
    assert [bucket_of((3 << 48) | counter, 3) for counter in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("name", ["no.such.module:X", "protos.errors:NoSuch", "", "nonsense"])
def test_a_tokenizer_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        TokenizerSpec(factory=name).load()
