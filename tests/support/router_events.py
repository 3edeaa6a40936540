"""What the tests of the router's machine are built from."""

from __future__ import annotations

from protos.messages import (
    ContextPhaseParams,
    DisaggRequestId,
    Finish,
    FinishReason,
    GenerateChunk,
    KvLayout,
    KvStats,
    SignedContextPhaseParams,
    StageTimes,
    Usage,
)

ID = DisaggRequestId(7, 1, 0)
SIGNED = SignedContextPhaseParams(b"payload", "k", b"mac")
LAYOUT = KvLayout(
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    tokens_per_block=4,
    model_fingerprint="m",
)
PARAMS = ContextPhaseParams(
    first_token_ids=(11,),
    disagg_request_id=ID,
    server_name="c",
    incarnation=1,
    rank_addresses=(b"a",),
    transport="inproc",
    layout=LAYOUT,
    num_prompt_tokens=3,
    prompt_digest=b"d",
    block_hashes=(),
    lease_ms=9000,
    pull_token=b"pull",
    usage=Usage(),
    model="m",
    seed=5,
    timing=StageTimes(first_token_ms=4.0),
)


def chunk(index: int, reason: FinishReason | None = None, **fields: object) -> GenerateChunk:
    finish = None
    if reason is not None:
        usage = Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=1)
        finish = Finish(reason=reason, usage=usage, kv=KvStats(transferred_blocks=index))
    return GenerateChunk(
        external_id="leg's own",
        token_index=index,
        token_ids=(10 + index,),
        text="ab",
        text_offset=2 * index,
        finish=finish,
        **fields,  # type: ignore[arg-type]
    )
