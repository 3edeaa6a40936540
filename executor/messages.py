"""What crosses between the proxy and its worker: one closed union per direction.

Requests, cancels and control travel in one ordered queue, so that a cancel
never overtakes its request; `Stop` is its end. What a step yields leaves as one
`Outputs`. Prompt ids stay int32 bytes all the way.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from executor.engine.control_seam import IterationStats, KvEvent, KvSnapshot
from executor.engine.seam import EngineAudit, EngineIdentity, EngineOutput, EngineRequest
from protos.errors import ErrorData
from protos.messages import DisaggRequestId, Load


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Submit(_Message, frozen=True):
    """`request.request_id` is the client id: the worker's mapping is the identity.

    The external id tells the same request apart across lanes.
    """

    request: EngineRequest
    external_id: str


class Cancel(_Message, frozen=True):
    client_id: int


class CancelNamed(_Message, frozen=True):
    """For a request that may be another lane's."""

    call_id: int
    external_id: str


class Release(_Message, frozen=True):
    call_id: int
    disagg_request_id: DisaggRequestId
    pull_token: bytes


class Renew(_Message, frozen=True):
    call_id: int
    disagg_request_id: DisaggRequestId
    pull_token: bytes


class LoadQuery(_Message, frozen=True):
    call_id: int


class AuditQuery(_Message, frozen=True):
    call_id: int


class Call(_Message, frozen=True):
    """A method of the engine's control, on every rank; `arguments` by name, as msgpack."""

    call_id: int
    method: str
    arguments: bytes


class Listen(_Message, frozen=True):
    """What this frontend wants to be told unasked, from now on."""

    stats: bool
    kv_events: bool


class KvSnapshotQuery(_Message, frozen=True):
    call_id: int


class Beat(_Message, frozen=True):
    """The frontend lives: its lane is not to be closed for silence."""


class Stop(_Message, frozen=True):
    """Nothing follows it. Only the world's owner may say it."""


ToWorker: TypeAlias = (
    Submit
    | Cancel
    | CancelNamed
    | Release
    | Renew
    | LoadQuery
    | AuditQuery
    | Call
    | Listen
    | KvSnapshotQuery
    | Beat
    | Stop
)


class Batch(_Message, frozen=True):
    """Several messages in one frame, in order."""

    messages: tuple[ToWorker, ...]


WorkerFrame: TypeAlias = ToWorker | Batch
"""What one frame to the worker holds."""


class Ready(_Message, frozen=True):
    identity: EngineIdentity


class Outputs(_Message, frozen=True):
    """`buckets`: what a frontend passes on to its postprocess workers (executor/post)."""

    accepted: tuple[int, ...]
    outputs: tuple[EngineOutput, ...]
    buckets: tuple[tuple[int, bytes], ...] = ()


class Heartbeat(_Message, frozen=True):
    """`progress` counts rounds of the worker's loop and what the engine does within them;
    `is_busy` says that it should grow."""

    progress: int
    is_busy: bool
    is_asleep: bool = False


class Reply(_Message, frozen=True):
    """To release, renew and cancel by name."""

    call_id: int
    value: bool


class LoadReply(_Message, frozen=True):
    call_id: int
    load: Load


class AuditReply(_Message, frozen=True):
    """`worker` are the worker's own counters: its ledger's and its socket's."""

    call_id: int
    audit: EngineAudit
    worker: dict[str, int]


class CallReply(_Message, frozen=True):
    """One value a rank, in order, each as msgpack; or the error of the first that failed."""

    call_id: int
    values: tuple[bytes, ...]
    error: ErrorData | None


class Observed(_Message, frozen=True):
    """What a step was, for those who listen."""

    stats: IterationStats | None
    kv_events: tuple[KvEvent, ...]


class KvSnapshotReply(_Message, frozen=True):
    call_id: int
    snapshot: KvSnapshot


class LaneClosed(_Message, frozen=True):
    """Nothing follows it: the worker has given this frontend up, and ended its requests."""

    why: str


class Died(_Message, frozen=True):
    """The worker's last message: why its engine is gone."""

    error: ErrorData


ToProxy: TypeAlias = (
    Ready
    | Outputs
    | Heartbeat
    | Reply
    | LoadReply
    | AuditReply
    | CallReply
    | KvSnapshotReply
    | Observed
    | LaneClosed
    | Died
)
