"""What may be given as a prompt, offline: a text, token ids or a conversation; one or many."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from baton.calls import Message, chat_message
from protos.checks import check_text
from protos.errors import InvalidRequestError, shorten
from protos.messages import ChatMessage

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
KINDS = "a text, token ids or chat messages"


def split_prompts(given: Prompt | Sequence[Prompt]) -> tuple[list[Any], bool]:
    """The prompts, and whether there was just the one and no list of them."""
    if isinstance(given, str):
        return [given], True
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise _no_prompt(given)
    items = list(given)
    is_single = bool(items) and (_is_token(items[0]) or _is_message(items[0]))
    return ([items], True) if is_single else (items, False)


def encode_prompt(prompt: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Raises InvalidRequestError for what is no prompt, or text that nobody can tokenise."""
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        return _needed(tokenizer, "a text").encode(prompt)
    if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping | bytes):
        raise _no_prompt(prompt)
    items = list(prompt)
    if items and _is_message(items[0]):
        messages = tuple(chat_message(item) for item in items)
        return _needed(tokenizer, "a conversation").encode_chat(messages)
    return token_ids_of(items, "prompt")


def token_ids_of(items: Iterable[Any], field: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(item) for item in items)
    except TypeError:
        raise InvalidRequestError(
            f"{field} is {shorten(items)}; it must be token ids",
            field=field,
            value=items,
            limit="token ids",
        ) from None


def _is_token(item: object) -> bool:
    """An array has `__index__` too, and works with it where it holds one number."""
    try:
        operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _is_message(item: object) -> bool:
    is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    return is_pair or isinstance(item, ChatMessage | Mapping)


def _needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError(
            f"prompt is {what}, and this LLM has no tokenizer; give token ids",
            field="prompt",
            value=what,
            limit="token ids",
        )
    return tokenizer


def _no_prompt(value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt is {shorten(value)}; it must be {KINDS}", field="prompt", value=value, limit=KINDS
    )
