"""A router on the test's own loop, and a client's view of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from common.logs import Logs
from common.security import CONTROL_METADATA_KEY, ClusterSecret, load_secret
from protos import control_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.codec import chunk_from_proto
from protos.errors import BatonError
from protos.messages import Finish
from protos.status import error_from_rpc
from protos.tokens import pack_token_ids
from router.config import RouterConfig
from router.run import Router


@dataclass
class Answer:
    """A whole stream, or what came of it before it failed."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    num_finishes: int = 0
    seed: int = 0
    external_id: str = ""
    error: BatonError | None = None


@dataclass
class Client:
    """Generate, Abort and Control calls on a router."""

    router: Router
    inference: Any
    control: Any
    metadata: tuple[tuple[str, str], ...]

    def start(self, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Any:
        """The open call; `max_tokens` and `stop` go to the sampling."""
        sampling = {
            name: fields.pop(name)
            for name in ("max_tokens", "stop", "seed", "stop_token_ids", "temperature", "top_p")
            if name in fields
        }
        timeout = fields.pop("timeout", 20)
        if "text" not in fields and "chat" not in fields:
            fields["token_ids"] = pack_token_ids(prompt)
        message = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **fields)
        return self.inference.Generate(message, timeout=timeout)

    async def generate(self, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Answer:
        return await collect(self.start(prompt, **fields))


async def collect(call: Any) -> Answer:
    answer = Answer()
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            chunk = chunk_from_proto(message)
            assert not message.HasField("context_phase_params"), "internal params reached a client"
            answer.token_ids += chunk.token_ids
            answer.text += chunk.text
            answer.seed = answer.seed or chunk.seed
            answer.external_id = chunk.external_id
            if chunk.finish is not None:
                answer.finish = chunk.finish
                answer.num_finishes += 1
    except grpc.aio.AioRpcError as error:
        answer.error = error_from_rpc(error)
    return answer


@asynccontextmanager
async def running_router(
    secret_file: Path,
    context_servers: Sequence[str],
    generation_servers: Sequence[str],
    *,
    is_usable: bool = True,
    **settings: Any,
) -> AsyncIterator[Client]:
    """`is_usable`: wait until the router can serve."""
    config = RouterConfig(
        listen="127.0.0.1:0",
        secret_file=str(secret_file),
        context_servers=tuple(context_servers),
        generation_servers=tuple(generation_servers),
        **{"shutdown_grace_s": 0.1, "heartbeat_s": 0.1, "heartbeat_timeout_s": 1.0, **settings},
    )
    router = Router(config, Logs(name="test", level="error"))
    address = await router.open()
    async with grpc.aio.insecure_channel(address) as channel:
        secret: ClusterSecret = load_secret(secret_file)
        client = Client(
            router,
            inference_pb2_grpc.InferenceStub(channel),  # type: ignore[no-untyped-call]
            control_pb2_grpc.ControlStub(channel),  # type: ignore[no-untyped-call]
            ((CONTROL_METADATA_KEY, secret.control_token()),),
        )
        try:
            if is_usable:
                await until(lambda: router.fleet.is_usable, "the router to be usable")
            yield client
        finally:
            await router.close()


async def until(is_true: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + timeout_s
    while not is_true():
        assert loop.time() < ends_s, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.01)


async def assert_at_rest(client: Client, *servers: Any) -> None:
    """Nothing is reserved, live or leased any more, here and on the scripted servers."""
    router = client.router
    await until(lambda: router.admission.num_in_flight == 0, "no request in flight")
    router.fleet.check()
    router.admission.check()
    assert all(s.num_reserved == 0 and s.reserved_tokens == 0 for s in router.fleet.servers)
    for name in ("reservations", "calls_ending"):
        await until(lambda n=name: router.audit().counters[n] == 0, f"no {name}")  # type: ignore[misc]
    for server in servers:
        await until(lambda s=server: s.num_open == 0, f"{server.name} to be idle")  # type: ignore[misc]
        await until(lambda s=server: not s.leases, f"{server.name}'s leases to end")  # type: ignore[misc]
