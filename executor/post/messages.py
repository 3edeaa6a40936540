"""What crosses between a frontend and a postprocess worker.

A frontend sends `Work`: what is new about requests, and outputs of the engine as
the engine's worker packed them, which the frontend never decodes. Each is
answered by one `Answer`, in parts where that is too large. The end of the worker's
standard input is its stop.
"""

from __future__ import annotations

from typing import Any, BinaryIO, TypeAlias

import msgspec

from executor.engine.seam import EngineFinish, EngineOutput
from executor.post.spec import TokenizerSpec
from executor.postprocess import TextParams
from protos.errors import ErrorData
from protos.messages import ContextPhaseParams, DisaggRequestId

TO_POST = b"to-post"
FROM_POST = b"from-post"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Work(_Message, frozen=True):
    """Handled in the order of its fields. `payloads` come from `pack_outputs`."""

    number: int
    opened: tuple[tuple[int, TextParams], ...]
    forgotten: tuple[int, ...]
    payloads: tuple[bytes, ...]


class Hello(_Message, frozen=True):
    """Connected; the tokenizer is not loaded yet."""

    pid: int


class Ready(_Message, frozen=True):
    pass


class Died(_Message, frozen=True):
    """The worker's last message: why it cannot serve."""

    error: ErrorData


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """How a finished context phase's KV is named when it is released."""

    disagg_request_id: DisaggRequestId
    pull_token: bytes


class Orphan(msgspec.Struct, frozen=True, array_like=True):
    """The lease of a request that the worker does not know: the frontend judges whose it is."""

    client_id: int
    lease: Lease


class PostChunk(msgspec.Struct, frozen=True, array_like=True):
    """One request's news. `stop_string` without `finish`: complete, so the engine can stop."""

    client_id: int
    token_index: int
    token_ids: tuple[int, ...]
    text: str
    text_offset: int
    finish: EngineFinish | None
    stop_string: str


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """A worker's own figures since it started, but for `live`, which is now."""

    live: int = 0
    late: int = 0
    """Outputs for requests that it does not know, or no longer."""
    malformed: int = 0
    bad_frames: int = 0


class Answer(_Message, frozen=True):
    """To the `Work` with the same number; where `is_part`, one more follows."""

    number: int
    chunks: tuple[PostChunk, ...]
    failed: tuple[tuple[int, ErrorData], ...]
    leases: tuple[Lease, ...]
    """Of context phases that a stop string ended: nobody will pull them."""
    orphans: tuple[Orphan, ...]
    num_dropped_tokens: int
    """Tokens that came after a stop string."""
    counts: Counts
    is_part: bool = False


FromPost: TypeAlias = Hello | Ready | Died | Answer
FROM_POST_UNION: Any = FromPost


class PostBootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """Told over the inherited standard input, length first: no key in argv or environment."""

    name: str
    key: bytes
    works_endpoint: str
    answers_endpoint: str
    tokenizer: TokenizerSpec
    queue_messages_max: int
    message_bytes_max: int
    parent_pid: int
    dies_with_parent_thread: bool


LENGTH_BYTES = 4


def pack_bootstrap(bootstrap: PostBootstrap) -> bytes:
    body = msgspec.msgpack.encode(bootstrap)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_bootstrap(stream: BinaryIO) -> PostBootstrap:
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(stream.read(length), type=PostBootstrap)


_outputs_decoder = msgspec.msgpack.Decoder(tuple[EngineOutput, ...])


def pack_outputs(outputs: list[EngineOutput] | tuple[EngineOutput, ...]) -> bytes:
    """By the engine's worker: a step's outputs for one bucket."""
    return msgspec.msgpack.encode(outputs)


def unpack_outputs(payload: bytes) -> tuple[EngineOutput, ...]:
    """Raises msgspec.MsgspecError for what `pack_outputs` did not make."""
    return _outputs_decoder.decode(payload)


def bucket_of(client_id: int, num_buckets: int) -> int:
    """Always the same worker for one request."""
    return client_id % num_buckets


def lease_of(params: ContextPhaseParams) -> Lease:
    return Lease(params.disagg_request_id, params.pull_token)
