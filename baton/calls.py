"""What the sync and the async client share: building requests, putting answers together.

Pure: no channel, no clock. `Assembler` sees each chunk with the instant it came
and yields a `Completion` once the chunk with `finish` was there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec

from protos import codec
from protos import inference_pb2 as pb
from protos.checks import check_text, invalid
from protos.completion import Completion, timing_of
from protos.errors import (
    InternalError,
    InvalidRequestError,
    ServerUnavailableError,
    shorten,
)
from protos.messages import (
    ChatMessage,
    Finish,
    GenerateChunk,
    SamplingParams,
)
from protos.tokens import pack_token_ids

DEADLINE_GRACE_S = 0.5
"""The transport's own deadline comes this much later, so that the server's answer wins."""

Message = ChatMessage | Mapping[str, str] | tuple[str, str]
"""One chat message: ChatMessage, {"role": ..., "content": ...} or (role, content)."""

_NOT_SAMPLING = ("model", "external_id", "timeout_s", "sampling")


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `chat`.

    `model` "" is the server's only one. `external_id` names the request for
    `abort`; where it is empty the server makes one up. `timeout_s` is the
    request's deadline; None is the client's. `sampling` gives all sampling
    parameters at once; those given one by one win over it.
    """

    model: str
    external_id: str
    timeout_s: float | None
    sampling: SamplingParams | None
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


# --- requests ---------------------------------------------------------------


class Call(NamedTuple):
    request: pb.GenerateRequest
    rpc_timeout_s: float | None


def make_call(
    options: CallOptions,
    timeout_s: float | None,
    *,
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[Message] | None = None,
) -> Call:
    """One of `prompt` and `messages` is given; `timeout_s` is the client's default.

    Raises InvalidRequestError for what cannot be sent and for an option that does
    not exist. All else is judged by the server.
    """
    own_timeout_s = options.get("timeout_s")
    timeout_s = timeout_s if own_timeout_s is None else own_timeout_s
    request = pb.GenerateRequest(
        external_id=_text(options.get("external_id", ""), "external_id"),
        model=_text(options.get("model", ""), "model"),
        sampling=codec.sampling_to_proto(sampling_of(options)),
        deadline_ms=deadline_ms_of(timeout_s),
    )
    if messages is not None:
        request.chat.SetInParent()
        request.chat.messages.extend(
            pb.ChatMessage(role=item.role, content=item.content)
            for item in map(chat_message, messages)
        )
    elif isinstance(prompt, str):
        request.text = _text(prompt, "prompt")
    else:
        request.token_ids = _packed(prompt or ())
    return Call(request, None if timeout_s is None else timeout_s + DEADLINE_GRACE_S)


def _text(text: str, field: str) -> str:
    check_text(field, text)
    return text


def make_abort(external_id: str, reason: str) -> pb.AbortRequest:
    """Raises InvalidRequestError for text that cannot be sent."""
    return pb.AbortRequest(
        external_ids=[_text(external_id, "external_id")], reason=_text(reason, "reason")
    )


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """Those given one by one win over those given at once. Raises InvalidRequestError."""
    whole = options.get("sampling")
    if not (whole is None or isinstance(whole, SamplingParams)):
        raise invalid("sampling", whole, "SamplingParams")
    given: dict[str, Any] = {k: v for k, v in options.items() if k not in _NOT_SAMPLING}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), Iterable):
            given[name] = tuple(given[name])
    for name in given:
        if name not in SamplingParams.__struct_fields__:
            raise _no_option(name)
    return msgspec.structs.replace(whole or SamplingParams(), **given)


def _no_option(name: str) -> InvalidRequestError:
    known = (*SamplingParams.__struct_fields__, *_NOT_SAMPLING)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; those of sampling are {', '.join(known)}"
    return InvalidRequestError(
        f"there is no option {name}{hint}", field=name, limit=", ".join(known)
    )


def deadline_ms_of(timeout_s: float | None) -> int:
    """0 means the server's default, so a tiny timeout is still 1 ms."""
    if timeout_s is None:
        return 0
    limit_s = codec.DEADLINE_MS_MAX / 1000
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= limit_s):
        raise InvalidRequestError(
            f"timeout_s is {shorten(timeout_s)}; it must be over 0, at most {limit_s:.0f}",
            field="timeout_s",
            value=timeout_s,
            limit=f"over 0, at most {limit_s:.0f}",
        )
    return max(1, int(timeout_s * 1000))


def _packed(token_ids: Sequence[int]) -> bytes:
    try:
        return pack_token_ids(token_ids)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"token_ids is {shorten(token_ids)}; every id must be an integer of 32 bits",
            field="token_ids",
            value=token_ids,
            limit="int32",
        ) from error


def chat_message(message: Message) -> ChatMessage:
    """Raises InvalidRequestError for what is none."""
    match message:
        case ChatMessage(role=role, content=content):
            return _checked(role, content)
        case {"role": str(role), "content": str(content), **rest} if not rest:
            return _checked(role, content)
        case (str(role), str(content)):
            return _checked(role, content)
    limit = 'ChatMessage, {"role": ..., "content": ...} or (role, content)'
    raise InvalidRequestError(
        f"messages holds {shorten(message)}; each one must be {limit}",
        field="messages",
        value=message,
        limit=limit,
    )


def _checked(role: str, content: str) -> ChatMessage:
    check_text("messages", role)
    check_text("messages", content)
    return ChatMessage(role, content)


# --- answers ----------------------------------------------------------------


class Assembler:
    """Puts one answer together: `add` each chunk as it comes, then `completion`."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_token_s: float | None = None
        self._last_token_s = started_s
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._text_length = 0
        self._finish: Finish | None = None
        self._external_id = ""
        self._seed = 0

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def external_id(self) -> str:
        """Known from the first chunk on."""
        return self._external_id

    def add(self, chunk: GenerateChunk, now_s: float) -> None:
        """Raises InternalError where the stream repeats or skips tokens or text."""
        if self._finish is not None:
            raise InternalError("the server went on after the end of the answer")
        self._external_id = self._external_id or chunk.external_id
        self._seed = self._seed or chunk.seed
        if chunk.token_ids:
            _check_position("token", chunk.token_index, len(self._token_ids))
            self._token_ids.extend(chunk.token_ids)
            self._last_token_s = now_s
            if self._first_token_s is None:
                self._first_token_s = now_s
        if chunk.text:
            _check_position("code point", chunk.text_offset, self._text_length)
            self._texts.append(chunk.text)
            self._text_length += len(chunk.text)
        self._finish = chunk.finish

    def completion(self) -> Completion:
        """Raises ServerUnavailableError where the stream ended before its answer did."""
        finish = self._finish
        if finish is None:
            raise ServerUnavailableError(
                f"the stream ended after {len(self._token_ids)} tokens without an end of the answer"
            )
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=finish.reason,
            usage=finish.usage,
            kv=finish.kv,
            timing=timing_of(
                started_s=self._started_s,
                first_token_s=self._first_token_s,
                last_token_s=self._last_token_s,
                num_tokens=len(self._token_ids),
                context=finish.context_timing,
                generation=finish.generation_timing,
            ),
            external_id=self._external_id,
            seed=self._seed,
            stop_string=finish.stop_string,
            stop_token_id=finish.stop_token_id,
        )


def _check_position(unit: str, got: int, expected: int) -> None:
    if got != expected:
        raise InternalError(f"the stream went on at {unit} {got} where {expected} was due")
