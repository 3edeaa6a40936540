"""The router's good paths, by real gRPC against scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.security import ClusterSecret, create_secret
from protos import control_pb2 as cpb
from protos.control_codec import ledger_from_proto, server_info_from_proto
from protos.errors import InvalidRequestError
from protos.messages import FinishReason, RequestType
from protos.status import error_from_rpc
from router.request import LIVE_STATES
from tests.support.router_client import Client, assert_at_rest, running_router, until
from tests.support.router_servers import ScriptedServer, completion, scripted_pair

PROMPT = (5, 6, 7, 8)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.fixture
def secret(secret_file: Path) -> ClusterSecret:
    return create_secret(secret_file)


@pytest.fixture
async def pair(secret: ClusterSecret) -> AsyncIterator[tuple[ScriptedServer, ScriptedServer]]:
    async with scripted_pair(secret) as servers:
        yield servers


@pytest.fixture
async def client(
    pair: tuple[ScriptedServer, ScriptedServer], secret_file: Path
) -> AsyncIterator[Client]:
    context, generation = pair
    async with running_router(secret_file, [context.address], [generation.address]) as client:
        yield client
        await assert_at_rest(client, *pair)


async def test_two_legs_are_one_stream(
    client: Client, pair: tuple[ScriptedServer, ScriptedServer]
) -> None:
    """Guards the whole path: right tokens once each, one finish, summed usage, one seed."""
    context, generation = pair
    answer = await client.generate(PROMPT, max_tokens=6, external_id="mine")
    token_ids, text = completion(PROMPT, 6)
    assert (answer.token_ids, answer.text, answer.error) == (token_ids, text, None)
    assert answer.num_finishes == 1
    assert answer.finish is not None
    assert answer.finish.reason is FinishReason.LENGTH
    assert answer.finish.usage.prompt_tokens == 4
    assert answer.finish.usage.cached_tokens == 1
    assert answer.finish.usage.completion_tokens == 6
    assert answer.finish.kv.transferred_blocks == 3
    assert answer.finish.context_timing is not None
    assert answer.finish.generation_timing is not None
    assert answer.external_id == "mine"
    first, second = context.seen.requests[0], generation.seen.requests[0]
    assert first.request_type is RequestType.CONTEXT_ONLY
    assert second.request_type is RequestType.GENERATION_ONLY
    assert first.sampling == second.sampling, "both legs see the same sampling"
    assert first.sampling.seed == second.sampling.seed == answer.seed
    assert first.disagg_request_id == second.disagg_request_id
    assert 0 < second.deadline_ms <= 600_000
    assert context.seen.released == [], "the generation side took the lease over"


async def test_first_token_comes_before_the_generation_leg(
    client: Client, pair: tuple[ScriptedServer, ScriptedServer]
) -> None:
    """Guards the time to first token: it must not wait for the KV to move."""
    _, generation = pair
    generation.script.hang_at = 1
    call = client.start(PROMPT, max_tokens=4)
    message = await asyncio.wait_for(call.read(), 2)
    assert list(message.token_ids) == completion(PROMPT, 1)[0]
    call.cancel()


async def test_a_first_token_that_ends_the_request_needs_no_generation(
    client: Client, pair: tuple[ScriptedServer, ScriptedServer]
) -> None:
    """Guards the answer to an immediate end of sequence: whole, with usage, and no second leg."""
    context, generation = pair
    context.script.stop_at = 0
    answer = await client.generate(PROMPT, max_tokens=6)
    assert answer.error is None
    assert answer.finish is not None
    assert answer.finish.reason is FinishReason.STOP
    assert (answer.token_ids, answer.text) == completion(PROMPT, 1)
    assert answer.finish.usage.completion_tokens == 1
    assert generation.seen.requests == []


async def test_max_tokens_of_one_is_a_whole_request_on_a_context_server(
    client: Client, pair: tuple[ScriptedServer, ScriptedServer]
) -> None:
    """Guards held-back text: a context_only leg would not flush it, and leave a lease behind."""
    context, generation = pair
    answer = await client.generate(PROMPT, max_tokens=1)
    assert answer.finish is not None
    assert answer.finish.reason is FinishReason.LENGTH
    assert answer.token_ids == completion(PROMPT, 1)[0]
    assert context.seen.requests[0].request_type is RequestType.CONTEXT_AND_GENERATION
    assert context.seen.requests[0].disagg_request_id is None
    assert generation.seen.requests == []


async def test_absent_max_tokens_is_decided_once(
    client: Client, pair: tuple[ScriptedServer, ScriptedServer]
) -> None:
    """Guards legs that would each deduce max_tokens from their own limits."""
    context, generation = pair
    generation.script.stop_at = 3
    answer = await client.generate(PROMPT)
    assert answer.token_ids == completion(PROMPT, 4)[0]
    assert context.seen.requests[0].sampling.max_tokens == 600 - 4
    assert generation.seen.requests[0].sampling.max_tokens == 600 - 4
    assert answer.external_id.startswith("router-"), "an id is minted where none is given"


async def test_many_streams_at_once(client: Client) -> None:
    """Guards streams that mix up each other's tokens or loads."""
    prompts = [(i + 1, i + 2) for i in range(32)]
    answers = await asyncio.gather(
        *(client.generate(p, max_tokens=2 + i % 7) for i, p in enumerate(prompts))
    )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert (answer.token_ids, answer.text) == completion(prompt, 2 + i % 7)


async def test_never_disaggregated_runs_on_generation_servers_alone(
    secret: ClusterSecret, secret_file: Path
) -> None:
    """Guards the aggregated mode: it must not wait for context servers."""
    generation = ScriptedServer("generation", secret)
    await generation.start()
    async with running_router(
        secret_file, [], [generation.address], disaggregation="never"
    ) as client:
        answer = await client.generate(PROMPT, max_tokens=5)
        assert (answer.token_ids, answer.text) == completion(PROMPT, 5)
        assert generation.seen.requests[0].request_type is RequestType.CONTEXT_AND_GENERATION
        await assert_at_rest(client, generation)
    await generation.stop()


async def test_least_loaded_spreads_open_streams(secret: ClusterSecret, secret_file: Path) -> None:
    """Guards reservations: with streams open, the second server must get its share."""
    context = ScriptedServer("context", secret)
    generations = [ScriptedServer("generation", secret, name=f"g{i}") for i in range(3)]
    for server in (context, *generations):
        await server.start()
    for server in generations:
        server.script.step_s = 0.05
        server.pullers.append(context)
    addresses = [server.address for server in generations]
    async with running_router(secret_file, [context.address], addresses) as client:
        await until(lambda: all(s.is_up for s in client.router.fleet.servers), "all to be up")
        answers = await asyncio.gather(*(client.generate(PROMPT, max_tokens=8) for _ in range(9)))
        assert all(answer.error is None for answer in answers)
        assert [len(server.seen.requests) for server in generations] == [3, 3, 3]
        await assert_at_rest(client, context, *generations)
    for server in (context, *generations):
        await server.stop()


async def test_control_tells_of_the_servers(
    client: Client, pair: tuple[ScriptedServer, ScriptedServer]
) -> None:
    """Guards status: the router's own view and each server's ledger in one answer."""
    _, generation = pair
    generation.script.hang_at = 2
    call = client.start(PROMPT, max_tokens=4)
    await call.read()
    await call.read()
    answer = await client.control.GetLedger(cpb.GetLedgerRequest(), metadata=client.metadata)
    ledger = ledger_from_proto(answer)
    assert set(ledger.entries_by_state) == set(LIVE_STATES), "every state is named, empty or not"
    assert {name: n for name, n in ledger.entries_by_state.items() if n} == {"generation": 1}
    assert ledger.counters["reservations"] == 1
    assert [server.name for server in ledger.servers] == ["context-0", "generation-0"]
    assert ledger.servers[1].ledger is not None
    assert ledger.servers[1].ledger.entries_by_state == {"running": 1}
    load = await client.control.GetLoad(cpb.GetLoadRequest(), metadata=client.metadata)
    assert (load.num_running, load.tokens_in_flight) == (1, 8)
    call.cancel()
    info = server_info_from_proto(
        await client.control.GetServerInfo(cpb.GetServerInfoRequest(), metadata=client.metadata)
    )
    assert (info.role, info.state) == ("router", "ready")
    assert [(s.role, s.state) for s in info.servers] == [
        ("context", "ready"),
        ("generation", "ready"),
    ]
    model = await client.control.GetModelInfo(cpb.GetModelInfoRequest(), metadata=client.metadata)
    assert (model.model, model.max_total_tokens) == ("scripted", 600)


async def test_control_needs_the_key_and_has_no_leases(client: Client) -> None:
    """Guards the trust boundary, and a caller who mistakes a router for a context server."""
    with pytest.raises(Exception, match="control key"):
        await client.control.GetLoad(cpb.GetLoadRequest())
    with pytest.raises(Exception, match="holds no leases") as caught:
        await client.control.Release(cpb.LeaseRequest(), metadata=client.metadata)
    assert isinstance(error_from_rpc(caught.value), InvalidRequestError)
