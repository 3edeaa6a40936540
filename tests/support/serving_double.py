"""A server in this process over an executor double, for tests of the gRPC shell.

The double speaks code points: token ids are characters, the completion of a
prompt is its text, reversed, over and over. It does what a test tells it
(`is_held`: nothing comes until `resume`), and notes what was asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from common.hashing import prompt_digest
from common.process import ProcessOptions
from common.security import CONTROL_METADATA_KEY, ClusterSecret, create_secret, load_secret
from common.text.tokenizer import Tokenizer
from executor.config import EngineConfig
from executor.engine.control_seam import IterationStats, KvEvent, KvSnapshot
from executor.engine.seam import EngineFinish, EngineIdentity
from executor.executor import GenerationExecutor
from executor.request import ExecutorRequest
from executor.result import GenerationResult, ResultChunk
from executor.subscriptions import Subscription
from protos import control_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.errors import BatonError, EngineDeadError, RequestCancelledError
from protos.messages import (
    ChatMessage,
    ContextPhaseParams,
    DisaggRequestId,
    FinishReason,
    KvLayout,
    KvStats,
    LedgerAudit,
    Load,
    ModelInfo,
    ModelLimits,
    RequestType,
    StageTimes,
    Usage,
)
from protos.tokens import pack_token_ids
from serving.config import ServerConfig
from serving.role import Role
from serving.run import ServerProcess
from serving.state import Serving

VOCAB_SIZE = 256
EOS = ord("!")
LIMITS = ModelLimits(
    model="letters", vocab_size=VOCAB_SIZE, max_prompt_tokens=32, max_total_tokens=40
)
LAYOUT = KvLayout(
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    tokens_per_block=4,
    model_fingerprint="f1",
)
IDENTITY = EngineIdentity(
    incarnation=7,
    model_info=ModelInfo(
        limits=LIMITS, dtype="float32", num_parameters=1, architecture="LettersForCausalLM"
    ),
    layout=LAYOUT,
    transport="inproc",
    rank_addresses=(b"here",),
    wires="inproc",
    num_blocks=64,
)


class LetterTokenizer(Tokenizer):
    """One token for each character."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = (EOS,)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in text)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return self.encode("".join(f"{item.role}:{item.content};" for item in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def piece(self, token_id: int) -> str | None:
        return None


class DoubleResult(GenerationResult):
    """Chunks as they were put in, never merged."""

    def __init__(self, client_id: int, request: ExecutorRequest) -> None:
        super().__init__(client_id, lambda _: None)
        self.request = request
        self.is_aborted = False
        self.before_abort: Callable[[], None] = lambda: None
        self.chunks: asyncio.Queue[ResultChunk | BatonError] = asyncio.Queue()
        self._ended: BatonError | None = None

    def __aiter__(self) -> DoubleResult:
        return self

    async def __anext__(self) -> ResultChunk:
        if self._ended is None:
            item = await self.chunks.get()
            if not isinstance(item, BatonError):
                return item
            self._ended = item
        raise self._ended

    def abort(self) -> None:
        if not self.is_aborted:
            self.is_aborted = True
            self.before_abort()
            self.chunks.put_nowait(RequestCancelledError("the request was cancelled"))


class DoubleExecutor(GenerationExecutor):
    """No process and no engine behind it."""

    def __init__(self) -> None:
        self.results: list[DoubleResult] = []
        self.released: list[DisaggRequestId] = []
        self.is_held = False
        self.trouble: BatonError | None = None
        self.is_shut_down = False
        self.breaks_on_submit = False
        self._death: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()

    @property
    def identity(self) -> EngineIdentity:
        return IDENTITY

    @property
    def form(self) -> str:
        return "double"

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return ()

    def abort_request(self, client_id: int) -> None:
        self.results[client_id].abort()

    def find(self, external_id: str) -> int | None:
        return None

    async def abort_named(self, external_id: str) -> bool:
        return False

    async def collective_rpc(self, method: str, **arguments: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def is_asleep(self) -> bool:
        return False

    def subscribe_stats(self) -> Subscription[IterationStats]:
        raise NotImplementedError

    def subscribe_kv_events(self) -> Subscription[KvEvent]:
        raise NotImplementedError

    async def kv_snapshot(self) -> KvSnapshot:
        raise NotImplementedError

    def submit(self, request: ExecutorRequest) -> DoubleResult:
        if self.breaks_on_submit:
            raise ZeroDivisionError("inner secret")
        result = DoubleResult(len(self.results), request)
        self.results.append(result)
        if not self.is_held:
            self.play(result)
        return result

    def play(self, result: DoubleResult) -> None:
        for chunk in completion(result.request):
            result.chunks.put_nowait(chunk)

    async def release(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        self.released.append(disagg_id)
        return True

    async def renew(self, disagg_id: DisaggRequestId, pull_token: bytes) -> bool:
        return disagg_id in self.released

    async def load(self) -> Load:
        return Load(num_queued=3, blocks_total=64)

    async def audit(self) -> LedgerAudit:
        return LedgerAudit(
            entries_by_state={"running": 2},
            blocks_by_state={"free": 60, "live": 4},
            blocks_by_owner={"sequence": 4},
            holders={5: ("sequence:1",)},
        )

    def check_health(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    async def wait_dead(self) -> EngineDeadError:
        return await asyncio.shield(self._death)

    def die(self, error: EngineDeadError) -> None:
        self.trouble = error
        for result in self.results:
            result.chunks.put_nowait(error)
        self._death.set_result(error)

    def pre_shutdown(self) -> None:
        pass

    async def shutdown(self) -> None:
        self.is_shut_down = True


def completion(request: ExecutorRequest) -> list[ResultChunk]:
    """All chunks of an answer, one token each."""
    prompt = request.prompt_token_ids
    params = request.context_phase_params
    first_index = len(params.first_token_ids) if params else 0
    tokens = [prompt[-1 - i % len(prompt)] for i in range(request.sampling.max_tokens or 0)]
    chunks = []
    for index in range(first_index, len(tokens)):
        is_eos = tokens[index] == EOS
        is_last = is_eos or index == len(tokens) - 1
        reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
        if request.request_type is RequestType.CONTEXT_ONLY and not is_eos:
            reason = FinishReason.CONTEXT
        finish = None
        if is_last:
            finish = EngineFinish(
                reason=reason,
                stop_token_id=EOS if is_eos else None,
                usage=Usage(prompt_tokens=len(prompt), completion_tokens=index + 1 - first_index),
                kv=KvStats(transferred_bytes=512, transferred_blocks=1) if params else KvStats(),
                timing=StageTimes(first_token_ms=1.0, transfer_ms=2.0 if params else 0.0),
                context_phase_params=(
                    hand_off(request, tokens[0]) if reason is FinishReason.CONTEXT else None
                ),
            )
        chunks.append(
            ResultChunk(
                token_index=index,
                token_ids=(tokens[index],),
                text=chr(tokens[index]),
                text_offset=index,
                finish=finish,
                stop_string="",
            )
        )
        if is_last:
            break
    return chunks


def hand_off(request: ExecutorRequest, first_token: int) -> ContextPhaseParams:
    assert request.disagg_request_id is not None
    return ContextPhaseParams(
        first_token_ids=(first_token,),
        disagg_request_id=request.disagg_request_id,
        server_name="",
        incarnation=IDENTITY.incarnation,
        rank_addresses=IDENTITY.rank_addresses,
        transport=IDENTITY.transport,
        layout=LAYOUT,
        num_prompt_tokens=len(request.prompt_token_ids),
        prompt_digest=prompt_digest(pack_token_ids(request.prompt_token_ids)),
        block_hashes=(),
        lease_ms=1000,
        pull_token=b"pull",
        usage=Usage(prompt_tokens=len(request.prompt_token_ids)),
        model="",
        seed=request.sampling.seed or 0,
        first_text_length=1,
    )


class DoubleServer(ServerProcess):
    """The real process's code, but its engine."""

    async def start_serving(self) -> Serving:
        self.executor = DoubleExecutor()
        return Serving(executor=self.executor, tokenizer=LetterTokenizer())


class RunningServer:
    """A server and a client of it; `exit_code` after `stop`."""

    def __init__(self, process: ServerProcess, task: asyncio.Task[int], stop: asyncio.Event):
        self.process = process
        self.task = task
        self.channel = grpc.aio.insecure_channel(process.state.address)
        self.inference: Any = inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]
        self.control: Any = control_pb2_grpc.ControlStub(self.channel)  # type: ignore[no-untyped-call]
        self.metadata = ((CONTROL_METADATA_KEY, process.state.secret.control_token()),)
        self.stopping = stop

    @property
    def executor(self) -> DoubleExecutor:
        assert isinstance(self.process, DoubleServer)
        return self.process.executor

    async def generate(self, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
        call.setdefault("timeout", 10)
        return [message async for message in self.inference.Generate(request, **call)]

    async def stop(self) -> int:
        self.stopping.set()
        return await asyncio.wait_for(self.task, 10)


@contextlib.asynccontextmanager
async def running_server(
    role: type[Role],
    folder: Path,
    *,
    process_type: type[ServerProcess] = DoubleServer,
    engine: EngineConfig | None = None,
    **keys: Any,
) -> AsyncIterator[RunningServer]:
    """A ready server on a free port, stopped at the end."""
    secret_file = folder / "secret"
    if not secret_file.exists():
        create_secret(secret_file)
    config = ServerConfig(
        **{"name": f"{role.name}-t", "listen": "127.0.0.1:0", "secret_file": str(secret_file)}
        | keys,
        engine=engine or EngineConfig(),
    )
    process = process_type(config, role, ProcessOptions(config=folder / "none", log_level="error"))
    stop = asyncio.Event()
    task = asyncio.create_task(process.serve(stop))
    await wait_until(lambda: process.state.phase == "ready" or task.done(), 30)
    if task.done():
        task.result()
    server = RunningServer(process, task, stop)
    try:
        yield server
    finally:
        await server.stop()
        await server.channel.close()


async def wait_until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.005)


def secret_of(folder: Path) -> ClusterSecret:
    return load_secret(folder / "secret")
