"""What the router does when clients leave, deadlines pass and servers die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.security import create_secret, load_secret
from protos import inference_pb2 as pb
from protos.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InternalError,
    KvTransferError,
    OverloadedError,
    RequestCancelledError,
    ServerUnavailableError,
)
from tests.support.router_client import (
    Answer,
    Client,
    assert_at_rest,
    collect,
    running_router,
    until,
)
from tests.support.router_servers import ScriptedServer, completion, scripted_pair

PROMPT = (5, 6, 7, 8)


@asynccontextmanager
async def cluster(
    folder: Path, **settings: Any
) -> AsyncIterator[tuple[Client, ScriptedServer, ScriptedServer]]:
    """At the end everything must be at rest, whatever happened."""
    file = folder / "secret"
    secret = create_secret(file)
    async with (
        scripted_pair(secret) as (context, generation),
        running_router(file, [context.address], [generation.address], **settings) as client,
    ):
        yield client, context, generation
        await assert_at_rest(client, context, generation)


# --- cancels ---------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["context", "between", "generation"])
@pytest.mark.parametrize("how", ["disconnect", "abort"])
async def test_a_cancel_in_any_phase_frees_everything(tmp_path: Path, phase: str, how: str) -> None:
    """Guards a client that leaves: the running leg ends at once, the lease too."""
    async with cluster(tmp_path) as (client, context, generation):
        server, hang_at, num_read = {
            "context": (context, 0, 0),
            "between": (generation, 1, 1),
            "generation": (generation, 2, 2),
        }[phase]
        server.script.hang_at = hang_at
        call = client.start(PROMPT, max_tokens=6, external_id="x")
        for _ in range(num_read):
            await call.read()
        await until(lambda: server.num_open == 1, "the leg to run")
        if how == "disconnect":
            call.cancel()
        else:
            response = await client.inference.Abort(
                pb.AbortRequest(external_ids=["x", "nobody"], reason="enough")
            )
            assert (list(response.aborted), list(response.unknown)) == (["x"], ["nobody"])
            answer = await collect(call)
            assert isinstance(answer.error, RequestCancelledError)
            assert "enough" in answer.error.message
        await until(lambda: len(server.seen.cancelled) == 1, "the leg to be cancelled", 1)
        assert server.seen.cancelled[0].startswith("x#"), "the client's id shows in a leg's"
        if phase == "between":
            await until(lambda: len(context.seen.released) == 1, "the lease to be released", 1)
        else:
            assert context.seen.released == []
        server.script.hang_at = None
        again = await client.generate(PROMPT, max_tokens=3, external_id="x")
        assert again.error is None, "the external id is free again"


async def test_a_client_that_does_not_read_is_ended_by_its_deadline(tmp_path: Path) -> None:
    """Guards the interrupt of a stream that waits in a write and not in a read."""
    async with cluster(tmp_path) as (client, _, generation):
        generation.script.step_s = 0.001
        call = client.start(PROMPT, max_tokens=500, deadline_ms=500)
        await asyncio.sleep(0.7)
        answer = await collect(call)
        assert isinstance(answer.error, DeadlineExceededError)


async def test_a_cancelled_id_can_be_used_again_at_once(tmp_path: Path) -> None:
    """Guards the legs' own ids: a server that has not seen the cancel yet would take the
    client's next request under the same id for a duplicate."""
    async with cluster(tmp_path) as (client, context, _):
        for _ in range(5):
            call = client.start(PROMPT, max_tokens=300, external_id="x")
            await call.read()
            await client.inference.Abort(pb.AbortRequest(external_ids=["x"]))
            await collect(call)
        ids = [request.external_id for request in context.seen.requests]
        assert len(set(ids)) == 5
        long_id = "y" * 256
        answer = await client.generate(PROMPT, max_tokens=2, external_id=long_id)
        assert (answer.error, answer.external_id) == (None, long_id)


async def test_a_storm_of_cancels_leaves_no_lease(tmp_path: Path) -> None:
    """Guards the hand-off that was already on its way when the client left: cancelling the
    call dropped it unread, and its blocks stayed pinned until the lease ended by itself."""
    async with cluster(tmp_path) as (client, context, _):

        async def leave(after_s: float) -> None:
            call = client.start(PROMPT, max_tokens=300)
            await asyncio.sleep(after_s)
            call.cancel()

        await asyncio.gather(*(leave(0.001 * i) for i in range(128)))
        answer = await client.generate(PROMPT, max_tokens=3)
        assert answer.error is None
        await until(lambda: not context.leases, "every lease to end", 2)


# --- deadlines ---------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["context", "between", "generation"])
async def test_the_deadline_ends_a_request_in_any_phase(tmp_path: Path, phase: str) -> None:
    """Guards bounded waiting: a server that hangs costs the client its deadline and no more."""
    async with cluster(tmp_path) as (client, context, generation):
        server, hang_at = {
            "context": (context, 0),
            "between": (generation, 1),
            "generation": (generation, 2),
        }[phase]
        server.script.hang_at = hang_at
        start = time.monotonic()
        answer = await client.generate(PROMPT, max_tokens=6, deadline_ms=300)
        assert isinstance(answer.error, DeadlineExceededError)
        assert 0.25 < time.monotonic() - start < 1.3
        assert server.seen.requests[-1].deadline_ms <= 300, "the remaining time travels"
        await until(lambda: len(server.seen.cancelled) == 1, "the leg to be cancelled", 1)


async def test_the_default_deadline_holds_where_none_is_given(tmp_path: Path) -> None:
    """Guards requests without a deadline, which would hang for ever."""
    async with cluster(tmp_path, default_deadline_s=0.2) as (client, context, _):
        context.script.hang_at = 0
        answer = await client.generate(PROMPT, max_tokens=6, timeout=None)
        assert isinstance(answer.error, DeadlineExceededError)


# --- failures of legs -------------------------------------------------------------------


async def test_the_lease_is_renewed_while_generation_waits(tmp_path: Path) -> None:
    """Guards a hand-off that waits longer than its lease in the generation server's queue."""
    async with cluster(tmp_path) as (client, context, generation):
        context.script.lease_ms = 150
        generation.script.step_s = 0.4
        answer = await client.generate(PROMPT, max_tokens=2)
        assert answer.error is None
        assert len(context.seen.renewed) >= 3
        num_renewed = len(context.seen.renewed)
        await asyncio.sleep(0.2)
        assert len(context.seen.renewed) == num_renewed, "and no longer than needed"


async def test_a_failed_context_leg_is_told_by_name(tmp_path: Path) -> None:
    """Guards the error that a server gave: class and message survive, the server is named."""
    async with cluster(tmp_path) as (client, context, generation):
        context.script.fail_at, context.script.error = 0, EngineDeadError("out of luck")
        answer = await client.generate(PROMPT, max_tokens=6)
        assert isinstance(answer.error, EngineDeadError)
        assert "context-0" in answer.error.message
        assert "out of luck" in answer.error.message
        assert generation.seen.requests == []


async def test_a_failed_pull_releases_the_lease(tmp_path: Path) -> None:
    """Guards pinned blocks: a generation leg that never took the KV must not leak the lease."""
    async with cluster(tmp_path) as (client, context, generation):
        generation.script.fail_at, generation.script.error = 1, KvTransferError("cut")
        answer = await client.generate(PROMPT, max_tokens=6)
        assert isinstance(answer.error, KvTransferError)
        assert "generation phase" in answer.error.message
        assert answer.token_ids == completion(PROMPT, 1)[0]
        await until(lambda: len(context.seen.released) == 1, "the release")


async def test_a_gap_is_never_forwarded(tmp_path: Path) -> None:
    """Guards exactly-once: a token that got lost on a server's side ends the request."""
    async with cluster(tmp_path) as (client, _, generation):
        generation.script.skip_at = 3
        answer = await client.generate(PROMPT, max_tokens=6)
        assert isinstance(answer.error, InternalError)
        assert answer.token_ids == completion(PROMPT, 3)[0]


async def test_a_hand_off_without_params_is_a_defect_not_a_hang(tmp_path: Path) -> None:
    """Guards the router against a context server that forgets what it must send."""
    async with cluster(tmp_path) as (client, context, _):
        context.script.params_missing = True
        answer = await client.generate(PROMPT, max_tokens=6)
        context.leases.clear()
        assert isinstance(answer.error, InternalError)


# --- no servers, wrong servers -----------------------------------------------------------


async def test_without_servers_the_refusal_names_role_and_reason(tmp_path: Path) -> None:
    """Guards the operator: UNAVAILABLE must say which role is missing and why, per server."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    context = ScriptedServer("context", secret)
    await context.start()
    async with running_router(file, [context.address], ["127.0.0.1:1"], is_usable=False) as client:
        await until(lambda: client.router.fleet.servers[0].is_up, "the context server")
        answer = await client.generate(PROMPT, max_tokens=3)
        assert isinstance(answer.error, ServerUnavailableError)
        assert "no generation server" in answer.error.message
        assert "127.0.0.1:1" in answer.error.message
    await context.stop()


async def test_servers_may_come_later_and_come_back(tmp_path: Path) -> None:
    """Guards start order and restarts: the router finds a server within about a second."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    context, generation = ScriptedServer("context", secret), ScriptedServer("generation", secret)
    await context.start()
    await generation.start()
    address = generation.address
    await generation.stop()
    async with running_router(file, [context.address], [address], is_usable=False) as client:
        await asyncio.sleep(0.3)
        second = ScriptedServer("generation", secret, incarnation=2)
        second.pullers.append(context)
        await second.start(address)
        await until(lambda: client.router.fleet.is_usable, "the late server", 3)
        assert (await client.generate(PROMPT, max_tokens=3)).error is None
        await second.stop()
        await until(lambda: not client.router.fleet.is_usable, "the loss to be seen", 2)
        third = ScriptedServer("generation", secret, incarnation=3)
        third.pullers.append(context)
        await third.start(address)
        await until(lambda: client.router.fleet.is_usable, "the return to be seen", 3)
        assert (await client.generate(PROMPT, max_tokens=3)).error is None
        await third.stop()
    await context.stop()


async def test_a_server_in_the_wrong_list_or_with_another_secret_is_down(tmp_path: Path) -> None:
    """Guards configuration slips: the reason must name them instead of failing requests."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    stranger = ScriptedServer("context", create_secret(tmp_path / "other"))
    wrong = ScriptedServer("context", secret)
    await stranger.start()
    await wrong.start()
    async with running_router(file, [stranger.address], [wrong.address], is_usable=False) as client:
        servers = client.router.fleet.servers
        await until(lambda: "control key" in servers[0].reason, "the refused key")
        await until(lambda: "generation_servers lists it" in servers[1].reason, "the wrong role")
    await stranger.stop()
    await wrong.stop()


async def test_overload_is_refused_at_once(tmp_path: Path) -> None:
    """Guards max_in_flight: the refusal is early, and a free place is free again."""
    async with cluster(tmp_path, max_in_flight=1) as (client, context, _):
        context.script.hang_at = 0
        call = client.start(PROMPT, max_tokens=3)
        await until(lambda: context.num_open == 1, "the first request to run")
        answer = await client.generate(PROMPT, max_tokens=3)
        assert isinstance(answer.error, OverloadedError)
        assert answer.error.limit == "1"
        context.script.hang_at = None
        call.cancel()
        await until(lambda: client.router.admission.num_in_flight == 0, "the place")
        assert (await client.generate(PROMPT, max_tokens=3)).error is None


async def test_closing_tells_open_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    """Guards shutdown: after the grace an open stream ends by UNAVAILABLE, not by silence."""
    async with cluster(tmp_path, shutdown_grace_s=0.3) as (client, _, generation):
        generation.script.hang_at = 2
        call = client.start(PROMPT, max_tokens=6)
        await call.read()
        closing = asyncio.create_task(client.router.close())
        await asyncio.sleep(0.1)
        late = await client.generate(PROMPT, max_tokens=2)
        assert isinstance(late.error, ServerUnavailableError)
        answer = await collect(call)
        assert isinstance(answer.error, ServerUnavailableError)
        assert "shutting down" in answer.error.message
        await closing


# --- real processes ----------------------------------------------------------------------


@asynccontextmanager
async def server_process(role: str, secret: Path, *options: str) -> AsyncIterator[Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.router_servers", "--role", role,
        "--secret", str(secret), *options,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    address = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
    try:
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_process_that_dies_or_freezes(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Guards detection: a killed server is known at once, a stopped one by its silence; every
    open stream hears of it, and the next request does not go there."""
    file = tmp_path / "secret"
    secret = create_secret(file)
    context = ScriptedServer("context", load_secret(file))
    await context.start()
    assert secret.keys == load_secret(file).keys
    async with (
        server_process("generation", file, "--step-s", "0.05") as (process, address),
        running_router(file, [context.address], [address]) as client,
    ):
        calls = [client.start(PROMPT, max_tokens=200) for _ in range(4)]
        for call in calls:
            await call.read()
            await call.read()
        context.leases.clear()  # the process pulled them
        os.kill(process.pid, number)
        start = time.monotonic()
        answers: list[Answer] = await asyncio.gather(*(collect(call) for call in calls))
        assert time.monotonic() - start < (1.0 if number == signal.SIGKILL else 2.5)
        for answer in answers:
            assert isinstance(answer.error, ServerUnavailableError)
            assert "generation server generation-0" in answer.error.message
        after = await client.generate(PROMPT, max_tokens=3)
        assert isinstance(after.error, ServerUnavailableError)
        assert "no generation server is usable" in after.error.message
        await assert_at_rest(client, context)
    await context.stop()


async def test_a_prefill_without_a_server_to_decode_it_ends_at_once(tmp_path: Path) -> None:
    """Guards requests whose prefill went on although no generation server was left: they
    heard of the death only when the context server came to them, tens of seconds later."""
    async with cluster(tmp_path, heartbeat_s=0.1) as (client, context, generation):
        context.script.hang_at = 0
        call = client.start(PROMPT, max_tokens=6)
        await until(lambda: context.num_open == 1, "the context leg")
        await generation.stop()
        start = time.monotonic()
        answer = await collect(call)
        assert isinstance(answer.error, ServerUnavailableError)
        assert "no generation server is usable" in answer.error.message
        assert time.monotonic() - start < 5 * 2.0
        await until(lambda: context.num_open == 0, "the prefill to be stopped")
