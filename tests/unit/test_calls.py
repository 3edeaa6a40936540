"""What both clients share: building requests, putting answers together."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.calls import Assembler, make_abort, make_call
from protos.errors import InternalError, InvalidRequestError, ServerUnavailableError
from protos.messages import (
    ChatMessage,
    Finish,
    FinishReason,
    GenerateChunk,
    KvStats,
    SamplingParams,
    Usage,
)

END = Finish(
    reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=3, completion_tokens=3),
    kv=KvStats(transferred_bytes=64),
)


def test_each_kind_of_prompt_becomes_its_own_field() -> None:
    assert make_call({}, None, prompt="hi").request.WhichOneof("prompt") == "text"
    ids = make_call({}, None, prompt=[1, 2]).request
    assert ids.token_ids == b"\x01\0\0\0\x02\0\0\0"
    chat = make_call({}, None, messages=[("system", "a"), {"role": "user", "content": "b"}])
    assert [(m.role, m.content) for m in chat.request.chat.messages] == [
        ("system", "a"),
        ("user", "b"),
    ]
    told = make_call({}, None, messages=[ChatMessage("user", "c")]).request
    assert told.chat.messages[0].content == "c"


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_reaches_the_server_as_what_it_is(prompt: Any) -> None:
    """An empty prompt must be refused as one, not as an absent one."""
    assert make_call({}, None, prompt=prompt).request.WhichOneof("prompt") is not None


def test_sampling_by_keyword_wins_over_sampling_at_once() -> None:
    base = SamplingParams(max_tokens=5, seed=7)
    sampling = make_call({"sampling": base, "max_tokens": 9}, None, prompt="a").request.sampling
    assert (sampling.max_tokens, sampling.seed) == (9, 7)


def test_a_stop_text_is_one_stop_and_not_its_letters() -> None:
    assert list(make_call({"stop": "END"}, None, prompt="a").request.sampling.stop) == ["END"]
    assert list(make_call({"stop": ["a", "b"]}, None, prompt="a").request.sampling.stop) == [
        "a",
        "b",
    ]


def test_zeroes_are_sent_so_that_the_server_can_refuse_them() -> None:
    sampling = make_call({"max_tokens": 0, "top_p": 0.0}, None, prompt="a").request.sampling
    assert sampling.HasField("max_tokens")
    assert sampling.HasField("top_p")


def test_an_unknown_option_is_refused_by_name() -> None:
    options: Any = {"max_token": 3}
    with pytest.raises(InvalidRequestError, match="no option max_token; did you mean max_tokens"):
        make_call(options, None, prompt="a")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": 1e9}, "timeout_s"),
        ({"timeout_s": 10**400}, "timeout_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"seed": -1}, "sampling.seed"),
        ({"seed": 1 << 64}, "sampling.seed"),
        ({"max_tokens": "many"}, "sampling.max_tokens"),
        ({"max_tokens": 1 << 31}, "sampling.max_tokens"),
        ({"max_tokens": 3.5}, "sampling.max_tokens"),
        ({"top_k": "3"}, "sampling.top_k"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"ignore_eos": "no"}, "sampling.ignore_eos"),
        ({"stop": 3}, "sampling.stop"),
        ({"stop": ["a", 3]}, "sampling.stop[1]"),
        ({"stop": "\udcff"}, "sampling.stop[0]"),
        ({"stop_token_ids": [1, "x"]}, "sampling.stop_token_ids[1]"),
        ({"model": "\udcff"}, "model"),
        ({"external_id": "\udcff"}, "external_id"),
        ({"external_id": 3}, "external_id"),
    ],
)
def test_what_cannot_be_sent_names_its_field(options: Any, field: str) -> None:
    """A seed of -1 was "sampling cannot be sent: Value out of range"; a lone surrogate a
    UnicodeEncodeError from within protobuf."""
    with pytest.raises(InvalidRequestError) as caught:
        make_call(options, None, prompt="a")
    error = caught.value
    assert error.field == field
    assert error.limit
    assert error.message.startswith(f"{field} is ")
    error.message.encode()
    error.value.encode()


def test_a_refusal_shows_field_value_and_limit() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_call({"seed": -1}, None, prompt="a")
    told = "sampling.seed is -1; it must be an unsigned 64-bit integer"
    assert caught.value.message == told


@pytest.mark.parametrize("content", ["\ud800", "caf\udce9"])
def test_a_prompt_that_no_utf8_holds_is_refused_by_name(content: str) -> None:
    """Bytes of an argument that are no UTF-8 come as lone surrogates: once a traceback."""
    with pytest.raises(InvalidRequestError, match="prompt is"):
        make_call({}, None, prompt=content)
    with pytest.raises(InvalidRequestError, match="messages is"):
        make_call({}, None, messages=[("user", content)])
    with pytest.raises(InvalidRequestError, match="external_id is"):
        make_abort(content, "")


def test_what_looks_like_a_number_is_sent_as_one() -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    options: Any = {"max_tokens": Seven(), "temperature": 1, "seed": (1 << 64) - 1}
    sampling = make_call(options, None, prompt="é").request.sampling
    assert (sampling.max_tokens, sampling.temperature) == (7, 1.0)
    assert sampling.seed == (1 << 64) - 1


@pytest.mark.parametrize("prompt", [[1 << 31], ["one"], [None]])
def test_token_ids_that_are_none_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token_ids"):
        make_call({}, None, prompt=prompt)


@pytest.mark.parametrize("message", ["hello", {"role": "user"}, {"role": 1, "content": "a"}, 3])
def test_a_message_of_another_shape_is_refused(message: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        make_call({}, None, messages=[message])


def test_the_deadline_travels_and_the_transport_waits_a_little_longer() -> None:
    call = make_call({"timeout_s": 2.0}, 60.0, prompt="a")
    assert call.request.deadline_ms == 2000
    assert call.rpc_timeout_s == pytest.approx(2.5)
    assert make_call({}, 60.0, prompt="a").request.deadline_ms == 60_000
    assert make_call({"timeout_s": 1e-5}, None, prompt="a").request.deadline_ms == 1
    assert make_call({}, None, prompt="a").rpc_timeout_s is None


def test_an_answer_is_put_together() -> None:
    assembler = Assembler(started_s=10.0)
    assembler.add(GenerateChunk(external_id="r1", token_ids=(5,), seed=9), 10.5)
    assembler.add(
        GenerateChunk(external_id="r1", token_index=1, token_ids=(6, 7), text="héy"), 10.9
    )
    assembler.add(GenerateChunk(external_id="r1", text="!", text_offset=3, finish=END), 11.0)
    done = assembler.completion()
    assert (done.text, done.token_ids) == ("héy!", (5, 6, 7))
    assert (done.external_id, done.seed, done.finish_reason) == ("r1", 9, "stop")
    assert done.kv.transferred_bytes == 64
    assert done.timing.ttft_ms == pytest.approx(500)
    assert done.timing.mean_itl_ms == pytest.approx(200)
    assert done.timing.total_ms == pytest.approx(900)


@pytest.mark.parametrize(
    "second",
    [
        GenerateChunk(external_id="r", token_index=0, token_ids=(6,)),
        GenerateChunk(external_id="r", token_index=2, token_ids=(6,)),
        GenerateChunk(external_id="r", token_index=1, token_ids=(6,), text="b", text_offset=0),
    ],
)
def test_repeated_or_skipped_tokens_and_text_are_noticed(second: GenerateChunk) -> None:
    """A stream taken up elsewhere must go on exactly where the first one ended."""
    assembler = Assembler(0.0)
    assembler.add(GenerateChunk(external_id="r", token_ids=(5,), text="a"), 1.0)
    with pytest.raises(InternalError, match="was due"):
        assembler.add(second, 2.0)


def test_nothing_may_follow_the_end() -> None:
    assembler = Assembler(0.0)
    assembler.add(GenerateChunk(external_id="r", finish=END), 1.0)
    with pytest.raises(InternalError, match="after the end"):
        assembler.add(GenerateChunk(external_id="r", finish=END), 1.0)


def test_a_stream_without_an_end_is_no_answer() -> None:
    with pytest.raises(ServerUnavailableError, match="0 tokens"):
        Assembler(0.0).completion()
