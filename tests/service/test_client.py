"""Both clients against a real gRPC server that says what the test told it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from baton.aio import AsyncClient
from baton.client import Client
from protos.errors import (
    ConfigError,
    DeadlineExceededError,
    DuplicateRequestError,
    RequestCancelledError,
    ServerUnavailableError,
)
from protos.messages import Finish, FinishReason, GenerateChunk, ServerInfo, Usage
from tests.support.cli_server import SayingServer, serving

END = Finish(reason=FinishReason.LENGTH, usage=Usage(prompt_tokens=2, completion_tokens=2))
ANSWER = (
    GenerateChunk(external_id="r", token_ids=(5,), text="a", seed=3),
    GenerateChunk(external_id="r", token_index=1, token_ids=(6,), text="b", text_offset=1),
    GenerateChunk(external_id="r", finish=END),
)
DUPLICATE = DuplicateRequestError("external_id 'x' is live", field="external_id", value="x")


def test_whole_and_streamed_answers_are_the_same() -> None:
    with serving(SayingServer(ANSWER)) as server, Client(server.address) as client:
        whole = client.generate("hi", max_tokens=2)
        with client.chat([("user", "hi")], stream=True) as stream:
            texts = [chunk.text for chunk in stream]
            assert stream.completion().token_ids == whole.token_ids == (5, 6)
    assert "".join(texts) == whole.text == "ab"
    assert whole.usage.completion_tokens == 2
    assert server.requests[0].sampling.max_tokens == 2


class SlowPrompt(list[int]):
    """Building the request takes a while, as a large prompt does."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.06)
        return super().__iter__()


async def test_the_clock_starts_when_the_call_is_made() -> None:
    """It started after sending: TTFT came out below the server's own first_token_ms."""
    prompt = SlowPrompt([1, 2])
    with serving(SayingServer(ANSWER)) as server:
        with Client(server.address) as client:
            answers = [client.generate(prompt)]
            answers.append(client.generate(prompt, stream=True).completion())
        async with AsyncClient(server.address) as aio:
            answers.append(await aio.generate(prompt))
            answers.append(await (await aio.generate(prompt, stream=True)).completion())
    for answer in answers:
        assert answer.timing.ttft_ms >= 60


async def test_the_async_client_answers_alike() -> None:
    with serving(SayingServer(ANSWER)) as server:
        async with AsyncClient(server.address) as client:
            whole = await client.generate("hi")
            async with await client.chat([("user", "hi")], stream=True) as stream:
                texts = [chunk.text async for chunk in stream]
                assert (await stream.completion()).token_ids == whole.token_ids
    assert "".join(texts) == whole.text == "ab"


def test_errors_are_typed_and_stay() -> None:
    with serving(SayingServer(ANSWER[:1], DUPLICATE)) as server, Client(server.address) as client:
        with pytest.raises(DuplicateRequestError) as caught:
            client.generate("hi")
        assert (caught.value.field, caught.value.value) == ("external_id", "x")
        stream = client.generate("hi", stream=True)
        assert next(stream).text == "a"
        for _ in range(2):
            with pytest.raises(DuplicateRequestError):
                next(stream)


async def test_async_errors_are_typed_and_stay() -> None:
    with serving(SayingServer(ANSWER[:1], DUPLICATE)) as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(DuplicateRequestError):
                await client.generate("hi")
            stream = await client.generate("hi", stream=True)
            assert (await anext(stream)).text == "a"
            for _ in range(2):
                with pytest.raises(DuplicateRequestError):
                    await anext(stream)


def test_leaving_a_stream_ends_the_request() -> None:
    """A client that stops reading must not leave the request running on the servers."""
    with serving(SayingServer(ANSWER[:1], hangs=True)) as server, Client(server.address) as client:
        with client.generate("hi", stream=True) as stream:
            assert next(stream).text == "a"
        assert server.was_cancelled.wait(5)
        with pytest.raises(StopIteration):
            next(stream)


async def test_leaving_an_async_stream_ends_the_request() -> None:
    with serving(SayingServer(ANSWER[:1], hangs=True)) as server:
        async with AsyncClient(server.address) as client:
            async with await client.generate("hi", stream=True) as stream:
                assert (await anext(stream)).text == "a"
            assert server.was_cancelled.wait(5)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


def test_a_silent_server_cannot_hold_a_client_beyond_its_deadline() -> None:
    with (
        serving(SayingServer(hangs=True)) as server,
        Client(server.address, timeout_s=0.2) as client,
        pytest.raises(DeadlineExceededError),
    ):
        client.generate("hi")
    assert server.requests[0].deadline_ms == 200


def test_a_stream_that_just_stops_is_an_error() -> None:
    """A status OK without a finish would else look like a short answer."""
    with (
        serving(SayingServer(ANSWER[:2])) as server,
        Client(server.address) as client,
        pytest.raises(ServerUnavailableError, match="2 tokens"),
    ):
        client.generate("hi")


def test_nobody_there_is_unavailable_and_names_the_address() -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(ServerUnavailableError, match=r"at 127\.0\.0\.1:1: check") as caught,
    ):
        client.generate("hi")
    assert (caught.value.field, caught.value.value) == ("address", "127.0.0.1:1")


async def test_nobody_there_is_told_alike_by_the_async_client() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ServerUnavailableError, match=r"at 127\.0\.0\.1:1: check"):
            await client.generate("hi")
        with pytest.raises(ServerUnavailableError, match=r"at 127\.0\.0\.1:1: check"):
            await client.is_ready()


@pytest.mark.parametrize("address", ["nonsense", "h:99999", "h:0", ":80", "h:x"])
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    """gRPC takes any text, and fails much later in its own words."""
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="HOST:PORT, port 1 to 65535"):
            kind(address)


def test_the_server_may_cancel() -> None:
    error = RequestCancelledError("aborted by an operator")
    with (
        serving(SayingServer(ANSWER[:1], error)) as server,
        Client(server.address) as client,
        pytest.raises(RequestCancelledError, match="operator"),
    ):
        client.generate("hi")


async def test_operators_calls() -> None:
    info = ServerInfo(name="router", role="router", incarnation=7, version="0.1.0")
    with serving(SayingServer(server_info=info)) as server:
        with Client(server.address, control_token="k:1") as client:
            assert client.info() == info
            assert client.abort("live")
            assert not client.abort("gone")
            assert client.is_ready()
            assert client.ledger().entries_by_state == {}
        async with AsyncClient(server.address, control_token="k:2") as aio:
            assert await aio.info() == info
            assert await aio.abort("live")
            assert await aio.is_ready()
            assert (await aio.ledger()).servers == ()
    assert [item["x-baton-control"] for item in server.metadata] == ["k:1", "k:2"]


def test_importing_the_sdk_is_cheap() -> None:
    """A client's program must not load an engine; `import baton` not even gRPC."""
    script = (
        "import sys, baton\n"
        "assert not {'grpc', 'torch', 'protos'} & set(sys.modules)\n"
        "from baton import AsyncClient, Client, SamplingParams, errors\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not {'torch', 'common', 'executor', 'ucxx', 'click'} & loaded, loaded\n"
        "from baton import LLM\n"  # its engine is another process
        "assert not {'torch', 'ucxx', 'click', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_public_surface() -> None:
    import baton

    for name in baton.__all__:
        assert getattr(baton, name) is not None
    with pytest.raises(AttributeError, match="LLMM"):
        _ = baton.LLMM


def test_a_router_that_comes_back_is_found_within_seconds() -> None:
    """gRPC's own backoff grows to two minutes: a client kept failing after a router's restart."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"127.0.0.1:{port}") as client:
        began_s = time.monotonic()
        while time.monotonic() - began_s < 4:  # long enough for the backoff to grow
            with pytest.raises(ServerUnavailableError):
                client.generate("x", max_tokens=1)
        with serving(SayingServer(ANSWER), port=port):
            back_s = time.monotonic()
            while True:
                try:
                    assert client.generate("hi", max_tokens=2).text == "ab"
                    break
                except ServerUnavailableError:
                    assert time.monotonic() - back_s < 5 * 1.5
                    time.sleep(0.05)
