"""The part of Control that concerns the engine: sleep, profiles, LoRA, statistics, KV events.

Each call is one collective call of the executor; the streams are subscriptions,
which end when the caller goes away. So nothing is built for nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, assert_never

import grpc
import msgspec

from common.answering import Answer
from executor.engine.control import PROFILE_S
from executor.engine.control_seam import (
    KvCleared,
    KvEvent,
    KvRemoved,
    KvSnapshot,
    KvStored,
)
from executor.executor import GenerationExecutor
from protos import control_pb2 as pb
from protos.structs import fields_of

Context = grpc.aio.ServicerContext[Any, Any]
SUBSCRIBED = (("baton-subscribed", "1"),)
"""Sent as soon as the subscription stands: what happens from then on is told."""


class Answering(Protocol):
    """What the servicer gives these calls."""

    def executor(self) -> GenerationExecutor:
        """Raises ServerUnavailableError where none is up."""

    def follow_engine(self) -> None:
        """What the server says of itself is to be true once the call is answered."""

    async def answer(self, context: Context, answer: Callable[[], Awaitable[Answer]]) -> Answer: ...

    def streaming(self, context: Context) -> AbstractAsyncContextManager[None]:
        """Checks the key first, and turns the error that ends its body into the status."""


class EngineControlCalls:
    """Mixed into the servicer; see the module's docstring."""

    async def Sleep(self: Answering, _request: Any, context: Context) -> pb.SleepResponse:  # noqa: N802
        async def answer() -> pb.SleepResponse:
            await self.executor().sleep()
            self.follow_engine()
            return pb.SleepResponse()

        return await self.answer(context, answer)

    async def WakeUp(self: Answering, _request: Any, context: Context) -> pb.WakeUpResponse:  # noqa: N802
        async def answer() -> pb.WakeUpResponse:
            await self.executor().wake_up()
            self.follow_engine()
            return pb.WakeUpResponse()

        return await self.answer(context, answer)

    async def StartProfile(  # noqa: N802
        self: Answering, request: pb.StartProfileRequest, context: Context
    ) -> pb.StartProfileResponse:
        async def answer() -> pb.StartProfileResponse:
            await self.executor().start_profile(request.path, request.max_s or PROFILE_S)
            return pb.StartProfileResponse()

        return await self.answer(context, answer)

    async def StopProfile(  # noqa: N802
        self: Answering, _request: Any, context: Context
    ) -> pb.StopProfileResponse:
        async def answer() -> pb.StopProfileResponse:
            files = await self.executor().stop_profile()
            return pb.StopProfileResponse(
                files=[
                    pb.TraceFile(
                        path=file.path,
                        num_steps=file.num_steps,
                        num_bytes=file.num_bytes,
                        recorded_s=file.recorded_s,
                        is_full=file.is_full,
                    )
                    for file in files
                ]
            )

        return await self.answer(context, answer)

    async def LoadLora(  # noqa: N802
        self: Answering, request: pb.LoadLoraRequest, context: Context
    ) -> pb.LoadLoraResponse:
        async def answer() -> pb.LoadLoraResponse:
            await self.executor().load_lora(request.name, request.path)
            return pb.LoadLoraResponse()

        return await self.answer(context, answer)

    async def UnloadLora(  # noqa: N802
        self: Answering, request: pb.UnloadLoraRequest, context: Context
    ) -> pb.UnloadLoraResponse:
        async def answer() -> pb.UnloadLoraResponse:
            await self.executor().unload_lora(request.name)
            return pb.UnloadLoraResponse()

        return await self.answer(context, answer)

    async def ListLoras(  # noqa: N802
        self: Answering, _request: Any, context: Context
    ) -> pb.ListLorasResponse:
        async def answer() -> pb.ListLorasResponse:
            loras = await self.executor().list_loras()
            return pb.ListLorasResponse(
                loras=[pb.LoraAdapter(name=lora.name, path=lora.path) for lora in loras]
            )

        return await self.answer(context, answer)

    async def SubscribeKvEvents(  # noqa: N802
        self: Answering, _request: Any, context: Context
    ) -> None:
        async with self.streaming(context):
            executor = self.executor()
            with executor.subscribe_kv_events() as events:
                snapshot = await executor.kv_snapshot()
                await context.write(pb.KvEventBatch(snapshot=_snapshot_to_proto(snapshot)))
                async for event in events:
                    if event.sequence > snapshot.sequence:
                        await context.write(pb.KvEventBatch(events=[_event_to_proto(event)]))

    async def SubscribeStats(  # noqa: N802
        self: Answering, _request: Any, context: Context
    ) -> None:
        async with self.streaming(context):
            with self.executor().subscribe_stats() as steps:
                await context.send_initial_metadata(SUBSCRIBED)
                async for stats in steps:
                    await context.write(pb.StepStats(**fields_of(stats)))


def _snapshot_to_proto(snapshot: KvSnapshot) -> pb.KvCacheSnapshot:
    return pb.KvCacheSnapshot(**msgspec.structs.asdict(snapshot))


def _event_to_proto(event: KvEvent) -> pb.KvCacheEvent:
    message = pb.KvCacheEvent(sequence=event.sequence)
    match event:
        case KvStored():
            message.stored.block_hashes.extend(event.block_hashes)
            message.stored.parent_hash = event.parent_hash
            message.stored.num_tokens = event.num_tokens
        case KvRemoved():
            message.removed.block_hashes.extend(event.block_hashes)
        case KvCleared():
            message.cleared.SetInParent()
        case _:
            assert_never(event)
    return message
