"""The executor's small parts, without a process: results, text, the inbox."""

from __future__ import annotations

import asyncio
import threading

import pytest

from executor.engine.seam import EngineFinish, EngineOutput
from executor.inbox import Inbox
from executor.messages import Cancel, Stop
from executor.postprocess import Postprocessor, text_params
from executor.result import GenerationResult, ResultChunk
from protos.errors import (
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
)
from protos.messages import FinishReason, KvStats, Usage
from tests.support.executor_scripted import CharTokenizer, request

LENGTH = EngineFinish(
    reason=FinishReason.LENGTH,
    usage=Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=9),
    kv=KvStats(transferred_blocks=5),
)


def text_of(*ids: int) -> str:
    return CharTokenizer().decode(ids)


def postprocessor(*stop: str) -> Postprocessor:
    tokenizer = CharTokenizer()
    return Postprocessor(text_params(request(stop=stop), tokenizer), tokenizer)


def output(index: int, *ids: int, finish: EngineFinish | None = None) -> EngineOutput:
    return EngineOutput(request_id=1, token_index=index, token_ids=ids, finish=finish)


async def test_unread_chunks_merge_and_the_end_is_sticky() -> None:
    """Guards: chunks lost or doubled by merging; a StopAsyncIteration that turns into a wait."""
    result = GenerationResult(1, lambda _: None)
    for index in range(5):
        result.push(ResultChunk(token_index=index, token_ids=(index,), text="x", text_offset=index))
    assert result.num_merged == 4
    assert await anext(result) == ResultChunk(token_ids=(0, 1, 2, 3, 4), text="xxxxx")
    result.push(ResultChunk(token_index=5, text_offset=5, finish=LENGTH))
    assert (await anext(result)).finish is LENGTH
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(result)


async def test_what_came_before_an_error_is_read_first() -> None:
    result = GenerationResult(1, lambda _: None)
    waiting = asyncio.ensure_future(result.__anext__())
    await asyncio.sleep(0)
    result.push(ResultChunk(token_ids=(1,)))
    error = EngineDeadError("gone")
    result.fail(error)
    assert (await waiting).token_ids == (1,)
    for _ in range(2):
        with pytest.raises(EngineDeadError) as raised:
            await anext(result)
        assert raised.value is error


def test_a_stop_in_mid_output_cuts_tokens_and_keeps_the_engines_numbers() -> None:
    """Guards: usage and KV numbers lost because a stop string ended the request by an abort."""
    post = postprocessor(text_of(5, 6))
    first = post.absorb(output(0, 4, 5, 6, 7))
    assert first is not None
    assert (first.token_ids, first.text, first.finish) == ((4, 5, 6), text_of(4), None)
    assert post.absorb(output(4, 8)) is None
    cancelled = RequestCancelledError("x").to_data()
    last = post.absorb(EngineOutput(request_id=1, finish=LENGTH, error=cancelled))
    assert last is not None
    assert last.finish is not None
    assert (last.token_index, last.text_offset, last.stop_string) == (3, 1, text_of(5, 6))
    assert last.finish.reason is FinishReason.STOP
    assert last.finish.usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3)
    assert last.finish.kv.transferred_blocks == 5
    assert post.num_dropped == 2


def test_half_a_stop_string_is_flushed_at_the_end() -> None:
    post = postprocessor(text_of(5, 6))
    first = post.absorb(output(0, 4, 5))
    assert first is not None
    assert first.text == text_of(4)
    last = post.absorb(output(2, finish=LENGTH))
    assert last is not None
    assert (last.token_index, last.text, last.stop_string) == (2, text_of(5), "")


def test_tokens_left_out_are_noticed_and_those_that_come_twice_dropped() -> None:
    """Guards: a hole in a stream that nobody sees, and a request that fails of a message that
    came twice."""
    text = postprocessor()
    with pytest.raises(InternalError, match="tokens from 0 on are missing: 1 came next"):
        text.absorb(output(1, 4))
    assert text.absorb(output(0, 4)) is not None
    assert text.absorb(output(0, 4)) is None
    assert text.num_dropped == 1
    assert text.absorb(output(1, 5)) is not None


def test_stop_strings_without_a_tokenizer_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        text_params(request(stop=("x",)), None)
    assert raised.value.field == "sampling.stop"


def test_a_full_inbox_holds_its_filler_and_lets_go_at_the_stop() -> None:
    """Guards: an inbox without a bound, or a receiver that no stop can free."""
    inbox = Inbox(2)
    inbox.put([(0, Cancel(1)), (0, Cancel(2))])
    filler = threading.Thread(target=inbox.put, args=([(0, Cancel(3))],))
    filler.start()
    filler.join(0.05)
    assert filler.is_alive()
    assert inbox.take(0) == [(0, Cancel(1)), (0, Cancel(2))]
    filler.join(5)
    assert inbox.take(None) == [(0, Cancel(3))]
    inbox.wake()
    assert inbox.take(None) == []
    inbox.put([(0, Cancel(4)), (0, Cancel(5))])
    inbox.stop()
    inbox.put([(0, Cancel(6))])
    assert inbox.take(0) == [(0, Cancel(4)), (0, Cancel(5)), (0, Stop()), (0, Cancel(6))]
