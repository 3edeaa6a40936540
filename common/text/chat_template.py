"""Chat templates: Jinja as model makers write it, run in a sandbox.

The environment is the one that templates are written for: blocks trimmed, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII
alone, and `{% generation %}` blocks, whose marks only matter in training.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protos.errors import ConfigError, InvalidRequestError, shorten, text_of
from protos.messages import ChatMessage


class ChatTemplate:
    """A compiled template. Raises ConfigError where `source` is no Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template does not compile: {error}", field="chat_template"
            ) from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, with the opening of the assistant's answer.

        Raises InvalidRequestError whatever the template trips over: most often
        it refuses the roles or their order.
        """
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[{"role": m.role, "content": m.content} for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {shorten(text_of(error), 200)}",
                field="messages",
            ) from error


def pick_template(value: Any) -> str | None:
    """The default template out of tokenizer_config.json's `chat_template`.

    It is a string, a mapping from names to templates, or a list of
    `{"name": ..., "template": ...}`.
    """
    if isinstance(value, list):
        value = {item["name"]: item["template"] for item in value if isinstance(item, Mapping)}
    if isinstance(value, Mapping):
        value = value.get("default")
    return value if isinstance(value, str) else None


class _GenerationBlock(Extension):
    """Lets `{% generation %}...{% endgeneration %}` stand for its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
