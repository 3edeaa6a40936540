"""Protobuf in, plain types out, and back: the one place that validates what came by wire.

`request_from_proto` checks what can be judged without a model; `check_limits`
checks a request against what a server can take. Both raise InvalidRequestError
(ModelNotFoundError for a wrong model) naming field, value and limit.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from protos import inference_pb2 as pb
from protos.checks import check_sampling, check_sendable, invalid
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
    RequestType,
    SamplingParams,
    SignedContextPhaseParams,
    StageTimes,
    Usage,
)
from protos.structs import fields_of, scalars_of
from protos.tokens import pack_token_ids, unpack_token_ids

EXTERNAL_ID_LENGTH_MAX = 256
CHAT_MESSAGES_MAX = 4096
ROLE_LENGTH_MAX = 64
DEADLINE_MS_MAX = 24 * 3600 * 1000
FIRST_TOKENS_MAX = 16

_REQUEST_TYPES = {
    pb.REQUEST_TYPE_UNSPECIFIED: RequestType.CONTEXT_AND_GENERATION,
    pb.REQUEST_TYPE_CONTEXT_ONLY: RequestType.CONTEXT_ONLY,
    pb.REQUEST_TYPE_GENERATION_ONLY: RequestType.GENERATION_ONLY,
    pb.REQUEST_TYPE_CONTEXT_AND_GENERATION: RequestType.CONTEXT_AND_GENERATION,
}
_REQUEST_TYPES_TO_PROTO = {
    RequestType.CONTEXT_ONLY: pb.REQUEST_TYPE_CONTEXT_ONLY,
    RequestType.GENERATION_ONLY: pb.REQUEST_TYPE_GENERATION_ONLY,
    RequestType.CONTEXT_AND_GENERATION: pb.REQUEST_TYPE_CONTEXT_AND_GENERATION,
}
_FINISH_REASONS = {
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_CONTEXT: FinishReason.CONTEXT,
}
_FINISH_REASONS_TO_PROTO = {reason: number for number, reason in _FINISH_REASONS.items()}


# --- requests ---------------------------------------------------------------


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Validate all that needs no model. Raises InvalidRequestError."""
    request_type = _REQUEST_TYPES.get(message.request_type)
    if request_type is None:
        raise invalid("request_type", message.request_type, "a known request type")
    if len(message.external_id) > EXTERNAL_ID_LENGTH_MAX:
        raise invalid(
            "external_id", message.external_id, f"at most {EXTERNAL_ID_LENGTH_MAX} characters"
        )
    if message.deadline_ms > DEADLINE_MS_MAX:
        raise invalid("deadline_ms", message.deadline_ms, f"at most {DEADLINE_MS_MAX}")
    signed = (
        signed_params_from_proto(message.context_phase_params)
        if message.HasField("context_phase_params")
        else None
    )
    _check_params_presence(request_type, signed)
    kind = message.WhichOneof("prompt")
    return GenerateRequest(
        external_id=message.external_id,
        model=message.model,
        text=_text(message) if kind == "text" else None,
        chat=_chat(message) if kind == "chat" else None,
        token_ids=_token_ids(message, kind),
        sampling=sampling_from_proto(message.sampling),
        request_type=request_type,
        deadline_ms=message.deadline_ms,
        context_phase_params=signed,
        disagg_request_id=(
            disagg_id_from_proto(message.disagg_request_id)
            if message.HasField("disagg_request_id")
            else None
        ),
    )


def _check_params_presence(
    request_type: RequestType, signed: SignedContextPhaseParams | None
) -> None:
    is_generation_only = request_type is RequestType.GENERATION_ONLY
    if is_generation_only and signed is None:
        raise invalid("context_phase_params", "absent", "given in a generation_only request")
    if signed is not None and not is_generation_only:
        raise invalid("context_phase_params", "given", f"absent in a {request_type} request")


def _text(message: pb.GenerateRequest) -> str:
    if not message.text:
        raise invalid("text", "", "at least one character")
    return message.text


def _chat(message: pb.GenerateRequest) -> tuple[ChatMessage, ...]:
    messages = message.chat.messages
    if not 1 <= len(messages) <= CHAT_MESSAGES_MAX:
        raise invalid("chat.messages", len(messages), f"1 to {CHAT_MESSAGES_MAX} messages")
    for index, item in enumerate(messages):
        if not 1 <= len(item.role) <= ROLE_LENGTH_MAX:
            raise invalid(
                f"chat.messages[{index}].role",
                item.role,
                f"a role such as user, of at most {ROLE_LENGTH_MAX} characters",
            )
    return tuple(ChatMessage(item.role, item.content) for item in messages)


def _token_ids(message: pb.GenerateRequest, kind: str | None) -> tuple[int, ...] | None:
    if kind is None:
        raise invalid("prompt", "absent", "one of text, chat and token_ids")
    if kind != "token_ids":
        return None
    if len(message.token_ids) % 4:
        raise invalid("token_ids", f"{len(message.token_ids)} bytes", "a multiple of 4 bytes")
    if not message.token_ids:
        raise invalid("token_ids", "0 tokens", "at least one token")
    return unpack_token_ids(message.token_ids)


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequestError for a value out of its range."""
    params = SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        temperature=message.temperature if message.HasField("temperature") else 0.0,
        top_k=message.top_k if message.HasField("top_k") else 0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
    check_sampling(params)
    return params


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        external_id=request.external_id,
        model=request.model,
        sampling=sampling_to_proto(request.sampling),
        request_type=_REQUEST_TYPES_TO_PROTO[request.request_type],
        deadline_ms=request.deadline_ms,
    )
    if request.text is not None:
        message.text = request.text
    elif request.chat is not None:
        message.chat.messages.extend(
            pb.ChatMessage(role=item.role, content=item.content) for item in request.chat
        )
    elif request.token_ids is not None:
        message.token_ids = pack_token_ids(request.token_ids)
    if request.context_phase_params is not None:
        message.context_phase_params.CopyFrom(signed_params_to_proto(request.context_phase_params))
    if request.disagg_request_id is not None:
        message.disagg_request_id.CopyFrom(disagg_id_to_proto(request.disagg_request_id))
    return message


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Sends only what was given. Raises InvalidRequestError for what no wire type holds."""
    check_sendable(params)
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def disagg_id_from_proto(message: pb.DisaggRequestId) -> DisaggRequestId:
    return DisaggRequestId(message.router_epoch, message.counter, message.attempt)


def disagg_id_to_proto(disagg_id: DisaggRequestId) -> pb.DisaggRequestId:
    return pb.DisaggRequestId(
        router_epoch=disagg_id.router_epoch,
        counter=disagg_id.counter,
        attempt=disagg_id.attempt,
    )


# --- context phase params ---------------------------------------------------


def signed_params_from_proto(message: pb.SignedContextPhaseParams) -> SignedContextPhaseParams:
    return SignedContextPhaseParams(message.payload, message.key_id, message.signature)


def signed_params_to_proto(signed: SignedContextPhaseParams) -> pb.SignedContextPhaseParams:
    return pb.SignedContextPhaseParams(
        payload=signed.payload, key_id=signed.key_id, signature=signed.signature
    )


def encode_params(params: ContextPhaseParams) -> bytes:
    """The payload that is signed."""
    return pb.ContextPhaseParams(
        first_token_ids=params.first_token_ids,
        disagg_request_id=disagg_id_to_proto(params.disagg_request_id),
        server_name=params.server_name,
        incarnation=params.incarnation,
        rank_addresses=params.rank_addresses,
        transport=params.transport,
        layout=layout_to_proto(params.layout),
        num_prompt_tokens=params.num_prompt_tokens,
        prompt_digest=params.prompt_digest,
        block_hashes=params.block_hashes,
        lease_ms=params.lease_ms,
        pull_token=params.pull_token,
        usage=_usage_to_proto(params.usage),
        model=params.model,
        seed=params.seed,
        serial=params.serial,
        timing=_timing_to_proto(params.timing),
        first_text_length=params.first_text_length,
    ).SerializeToString(deterministic=True)


def decode_params(payload: bytes) -> ContextPhaseParams:
    """Raises InvalidRequestError for bytes that are no such message or miss a part of it."""
    message = pb.ContextPhaseParams()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise invalid(
            "context_phase_params", f"{len(payload)} bytes", "an undamaged ContextPhaseParams"
        ) from error
    for name in ("disagg_request_id", "layout", "usage"):
        if not message.HasField(name):
            raise invalid(f"context_phase_params.{name}", "absent", "given")
    if not 1 <= len(message.first_token_ids) <= FIRST_TOKENS_MAX:
        raise invalid(
            "context_phase_params.first_token_ids",
            len(message.first_token_ids),
            f"1 to {FIRST_TOKENS_MAX} tokens",
        )
    return ContextPhaseParams(
        first_token_ids=tuple(message.first_token_ids),
        disagg_request_id=disagg_id_from_proto(message.disagg_request_id),
        server_name=message.server_name,
        incarnation=message.incarnation,
        rank_addresses=tuple(message.rank_addresses),
        transport=message.transport,
        layout=layout_from_proto(message.layout),
        num_prompt_tokens=message.num_prompt_tokens,
        prompt_digest=message.prompt_digest,
        block_hashes=tuple(message.block_hashes),
        lease_ms=message.lease_ms,
        pull_token=message.pull_token,
        usage=_usage_from_proto(message.usage),
        model=message.model,
        seed=message.seed,
        serial=message.serial,
        timing=_timing_from_proto(message.timing),
        first_text_length=message.first_text_length,
    )


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(**fields_of(layout))


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    return KvLayout(**scalars_of(message, KvLayout))


# --- answers ----------------------------------------------------------------


def chunk_to_proto(chunk: GenerateChunk) -> pb.GenerateResponse:
    message = pb.GenerateResponse(
        external_id=chunk.external_id,
        token_index=chunk.token_index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        text_offset=chunk.text_offset,
        seed=chunk.seed,
    )
    if chunk.finish is not None:
        message.finish.CopyFrom(_finish_to_proto(chunk.finish))
    if chunk.context_phase_params is not None:
        message.context_phase_params.CopyFrom(signed_params_to_proto(chunk.context_phase_params))
    return message


def chunk_from_proto(message: pb.GenerateResponse) -> GenerateChunk:
    return GenerateChunk(
        external_id=message.external_id,
        token_index=message.token_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        text_offset=message.text_offset,
        seed=message.seed,
        finish=_finish_from_proto(message.finish) if message.HasField("finish") else None,
        context_phase_params=(
            signed_params_from_proto(message.context_phase_params)
            if message.HasField("context_phase_params")
            else None
        ),
    )


def _finish_to_proto(finish: Finish) -> pb.Finish:
    message = pb.Finish(
        reason=_FINISH_REASONS_TO_PROTO[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=_usage_to_proto(finish.usage),
        kv=pb.KvStats(**fields_of(finish.kv)),
    )
    if finish.context_timing is not None:
        message.context_timing.CopyFrom(_timing_to_proto(finish.context_timing))
    if finish.generation_timing is not None:
        message.generation_timing.CopyFrom(_timing_to_proto(finish.generation_timing))
    return message


def _finish_from_proto(message: pb.Finish) -> Finish:
    return Finish(
        reason=_FINISH_REASONS.get(message.reason, FinishReason.STOP),
        stop_string=message.stop_string,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=_usage_from_proto(message.usage),
        kv=KvStats(**scalars_of(message.kv, KvStats)),
        context_timing=(
            _timing_from_proto(message.context_timing)
            if message.HasField("context_timing")
            else None
        ),
        generation_timing=(
            _timing_from_proto(message.generation_timing)
            if message.HasField("generation_timing")
            else None
        ),
    )


def _usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(**fields_of(usage))


def _usage_from_proto(message: pb.Usage) -> Usage:
    return Usage(**scalars_of(message, Usage))


def _timing_to_proto(timing: StageTimes) -> pb.StageTimes:
    return pb.StageTimes(**fields_of(timing))


def _timing_from_proto(message: pb.StageTimes) -> StageTimes:
    return StageTimes(**scalars_of(message, StageTimes))
