"""The wire's one validator: what is refused, by which name, and that nothing is lost in between."""

from __future__ import annotations

import math

import pytest

from protos import checks, codec, control_codec
from protos import inference_pb2 as pb
from protos.errors import InvalidRequestError, ModelNotFoundError
from protos.messages import (
    ChatMessage,
    ContextPhaseParams,
    DisaggRequestId,
    Finish,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    KvLayout,
    KvStats,
    LedgerAudit,
    Load,
    ModelInfo,
    ModelLimits,
    RequestType,
    SamplingParams,
    ServerInfo,
    ServerLedger,
    SignedContextPhaseParams,
    StageTimes,
    Usage,
)
from protos.tokens import pack_token_ids

LAYOUT = KvLayout(
    dtype="float32",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    tokens_per_block=16,
    model_fingerprint="f00d",
)
PARAMS = ContextPhaseParams(
    first_token_ids=(7,),
    disagg_request_id=DisaggRequestId((1 << 64) - 1, 2, 3),
    server_name="context-0",
    incarnation=(1 << 64) - 5,
    rank_addresses=(b"\x00\xff", b""),
    transport="ucx",
    layout=LAYOUT,
    num_prompt_tokens=33,
    prompt_digest=b"d" * 16,
    block_hashes=(b"a" * 16, b"b" * 16),
    lease_ms=10_000,
    pull_token=b"t" * 16,
    usage=Usage(prompt_tokens=33, cached_tokens=16, completion_tokens=1),
    model="m",
    seed=(1 << 64) - 1,
    serial=9,
    timing=StageTimes(scheduled_ms=0.5, first_token_ms=2.25),
    first_text_length=4,
)
LIMITS = ModelLimits(model="m", vocab_size=100, max_prompt_tokens=40, max_total_tokens=50)


def request(sampling: pb.SamplingParams | None = None, **changes: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(text="hello")
    for name, value in changes.items():
        setattr(message, name, value)
    if sampling is not None:
        message.sampling.CopyFrom(sampling)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=b""), "token_ids"),
        (pb.GenerateRequest(token_ids=b"abc"), "token_ids"),
        (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])),
            "chat.messages[0].role",
        ),
        (
            # A role of megabytes was tokenised on the event loop and froze every stream.
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="x" * 65)])),
            "chat.messages[0].role",
        ),
        (request(request_type=77), "request_type"),
        (request(external_id="x" * 257), "external_id"),
        (request(deadline_ms=1 << 31), "deadline_ms"),
        (request(request_type=pb.REQUEST_TYPE_GENERATION_ONLY), "context_phase_params"),
        (request(sampling=pb.SamplingParams(max_tokens=0)), "sampling.max_tokens"),
        (request(sampling=pb.SamplingParams(max_tokens=-3)), "sampling.max_tokens"),
        (request(sampling=pb.SamplingParams(temperature=-0.1)), "sampling.temperature"),
        (request(sampling=pb.SamplingParams(temperature=math.nan)), "sampling.temperature"),
        (request(sampling=pb.SamplingParams(temperature=math.inf)), "sampling.temperature"),
        (request(sampling=pb.SamplingParams(top_p=0.0)), "sampling.top_p"),
        (request(sampling=pb.SamplingParams(top_p=1.01)), "sampling.top_p"),
        (request(sampling=pb.SamplingParams(top_p=math.nan)), "sampling.top_p"),
        (request(sampling=pb.SamplingParams(top_k=-1)), "sampling.top_k"),
        (request(sampling=pb.SamplingParams(stop=[""])), "sampling.stop"),
        (request(sampling=pb.SamplingParams(stop=["x"] * 17)), "sampling.stop"),
        (request(sampling=pb.SamplingParams(stop_token_ids=[1] * 65)), "sampling.stop_token_ids"),
    ],
)
def test_bad_requests_are_refused_by_name(message: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.request_from_proto(message)
    error = caught.value
    assert error.field == field
    assert error.limit
    assert field in error.message
    assert error.limit in error.message


def test_params_do_not_belong_to_other_request_types() -> None:
    message = request()
    message.context_phase_params.payload = b"x"
    with pytest.raises(InvalidRequestError, match="context_phase_params is given"):
        codec.request_from_proto(message)


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "a"},
        {"chat": (ChatMessage("user", "hi"), ChatMessage("assistant", ""))},
        {"token_ids": (0, 1, 2**31 - 1)},
    ],
)
def test_request_survives_the_wire(prompt: dict[str, object]) -> None:
    original = GenerateRequest(
        external_id="é",
        model="m",
        sampling=SamplingParams(
            max_tokens=3,
            temperature=0.8,
            top_k=4,
            top_p=0.5,
            seed=(1 << 64) - 1,
            stop=("a", "b"),
            stop_token_ids=(1, 2),
            ignore_eos=True,
        ),
        request_type=RequestType.GENERATION_ONLY,
        deadline_ms=5,
        context_phase_params=SignedContextPhaseParams(b"p", "k", b"s"),
        disagg_request_id=DisaggRequestId(1, 2, 3),
        **prompt,  # type: ignore[arg-type]
    )
    wire = codec.request_to_proto(original).SerializeToString()
    assert codec.request_from_proto(pb.GenerateRequest.FromString(wire)) == original


def test_defaults_are_greedy_and_unbounded() -> None:
    assert codec.request_from_proto(pb.GenerateRequest(text="a")).sampling == SamplingParams()


def test_context_phase_params_survive_the_wire() -> None:
    assert codec.decode_params(codec.encode_params(PARAMS)) == PARAMS


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff", codec.encode_params(PARAMS)[:-1]])
def test_damaged_params_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="context_phase_params"):
        codec.decode_params(payload)


def test_chunk_survives_the_wire() -> None:
    chunk = GenerateChunk(
        external_id="e",
        token_index=5,
        token_ids=(1, 2),
        text="né",
        text_offset=9,
        seed=3,
        finish=Finish(
            reason=FinishReason.STOP,
            stop_string="x",
            stop_token_id=0,
            usage=Usage(prompt_tokens=1, completion_tokens=2),
            kv=KvStats(transferred_tokens=1, transferred_blocks=1, transferred_bytes=9),
            context_timing=StageTimes(scheduled_ms=1.5),
        ),
        context_phase_params=SignedContextPhaseParams(b"p", "k", b"s"),
    )
    wire = codec.chunk_to_proto(chunk).SerializeToString()
    assert codec.chunk_from_proto(pb.GenerateResponse.FromString(wire)) == chunk
    assert codec.chunk_from_proto(codec.chunk_to_proto(GenerateChunk(external_id="e"))) == (
        GenerateChunk(external_id="e")
    )


def test_control_answers_survive_the_wire() -> None:
    server = ServerInfo(
        name="c", role="context", incarnation=7, version="0.1", layout=LAYOUT, state="ready"
    )
    info = ServerInfo(name="r", role="router", incarnation=1, version="0.1", servers=(server,))
    assert control_codec.server_info_from_proto(control_codec.server_info_to_proto(info)) == info
    model = ModelInfo(limits=LIMITS, dtype="float32", num_parameters=9, architecture="Llama")
    assert control_codec.model_info_from_proto(control_codec.model_info_to_proto(model)) == model
    load = Load(num_queued=1, num_running=2, tokens_in_flight=3, blocks_free=4, blocks_total=5)
    assert control_codec.load_from_proto(control_codec.load_to_proto(load)) == load
    audit = LedgerAudit(
        entries_by_state={"running": 1},
        blocks_by_state={"free": 3},
        blocks_by_owner={"sequence": 1},
        holders={4: ("sequence:1", "lease:2")},
        counters={"late": 1},
        servers=(ServerLedger(name="c", ledger=LedgerAudit()), ServerLedger(name="d", error="x")),
    )
    assert control_codec.ledger_from_proto(control_codec.ledger_to_proto(audit)) == audit


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "field"),
    [
        (0, None, "prompt"),
        (41, None, "prompt"),
        (40, 11, "sampling.max_tokens"),
        (1, 50, "sampling.max_tokens"),
    ],
)
def test_limits_are_refused_with_the_users_numbers(
    num_tokens: int, max_tokens: int | None, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checks.check_limits(num_tokens, SamplingParams(max_tokens=max_tokens), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(1, 49), (40, 10), (40, None)])
def test_limits_are_inclusive(num_tokens: int, max_tokens: int | None) -> None:
    checks.check_limits(num_tokens, SamplingParams(max_tokens=max_tokens), LIMITS)


def test_a_prompt_that_fills_everything_leaves_no_room() -> None:
    limits = ModelLimits(model="m", vocab_size=9, max_prompt_tokens=50, max_total_tokens=50)
    with pytest.raises(InvalidRequestError, match="at most 49"):
        checks.check_limits(50, SamplingParams(), limits)


@pytest.mark.parametrize("token_id", [-1, 100])
def test_token_ids_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\].*0 to 99"):
        checks.check_token_ids((0, token_id), "token_ids", LIMITS)


def test_unknown_model() -> None:
    checks.check_model("", LIMITS)
    checks.check_model("m", LIMITS)
    with pytest.raises(ModelNotFoundError, match="'other' is not served here"):
        checks.check_model("other", LIMITS)


def test_packed_ids_are_little_endian_int32() -> None:
    assert pack_token_ids((1, -1)) == b"\x01\x00\x00\x00\xff\xff\xff\xff"


def test_block_bytes_follow_the_models_shape() -> None:
    assert LAYOUT.block_bytes == 30 * 2 * 3 * 16 * 64 * 4
    assert [LAYOUT.num_blocks(n) for n in (1, 15, 16, 17)] == [1, 1, 1, 2]
