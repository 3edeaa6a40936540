"""`baton generate` and `baton chat`: ask a running cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from baton.cli.server_option import find_server, server_options
from protos.errors import BatonError, InvalidRequestError

if TYPE_CHECKING:
    from baton.client import Client, TokenStream
    from protos.completion import Completion


def _request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option(
            "--max-tokens",
            type=int,
            help="Stop after so many tokens.  [default: as many as the model's and the pool's "
            "limits leave room for]",
        ),
        click.option("--temperature", type=float, help="0 is greedy.  [default: 0]"),
        click.option("--top-k", type=int, help="Draw from the K likeliest tokens; 0: off."),
        click.option("--top-p", type=float, help="Draw from the likeliest share P; 1: off."),
        click.option("--seed", type=int, help="Same seed, same tokens.  [default: random]"),
        click.option("--stop", multiple=True, help="Stop before this text. May be repeated."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end."),
        click.option("--model", default="", help="Refuse to be answered by another model."),
        click.option("--external-id", default="", help="The request's name, for logs and aborts."),
        click.option("--timeout", "timeout_s", type=float, metavar="SECONDS"),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end."),
    )
    for option in reversed(options):
        command = option(command)
    return server_options(command)


@click.command(short_help="Complete a prompt.")
@click.argument("prompt", required=False)
@click.option("--prompt-ids", metavar="1,2,3", help="Token ids instead of a text.")
@_request_options
def generate(
    prompt: str | None,
    prompt_ids: str | None,
    server: str | None,
    runtime_dir: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Complete PROMPT; the text is printed as it comes.

    Without PROMPT, or where it is -, the prompt is read from stdin (less its
    last line break). A base model goes on until --max-tokens or its limits end it.

    \b
    Examples:
      baton generate "Once upon a time" --max-tokens 32
      baton generate --max-tokens 32 --temperature 0.8 --seed 7 < story.txt
      baton generate --prompt-ids 1,2,3 --max-tokens 32 --json | jq .kv
    """
    from baton.client import Client

    given = _token_ids(prompt, prompt_ids) if prompt_ids is not None else _text(prompt)
    with Client(find_server(server, runtime_dir)) as client:
        with _refusals_are_usage():
            stream = client.generate(given, stream=True, **_given(options))
        _answer(stream, as_json=as_json)


@click.command(short_help="Talk by the chat template.")
@click.argument("message", required=False)
@click.option("--system", help="What the model shall be, before the conversation.")
@_request_options
def chat(
    message: str | None,
    system: str | None,
    server: str | None,
    runtime_dir: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Send MESSAGE by the model's chat template; without MESSAGE, hold a conversation.

    On a terminal each line is a message. Ctrl-C ends an answer, and that turn is
    forgotten; Ctrl-D, or Ctrl-C at the prompt, ends the conversation. Otherwise
    all of stdin is one message.

    \b
    Examples:
      baton chat "Why is the sky blue?"
      baton chat --system "You answer in one sentence."
    """
    from baton.client import Client

    history = [("system", system)] if system else []
    with Client(find_server(server, runtime_dir)) as client:
        if message is None and _is_terminal():
            _converse(client, history, as_json=as_json, **_given(options))
            return
        said = _text(message)
        if not said.strip():
            raise click.UsageError("the message is empty; it must hold at least one character")
        with _refusals_are_usage():
            stream = client.chat([*history, ("user", said)], stream=True, **_given(options))
        _answer(stream, as_json=as_json)


def _converse(
    client: Client, history: list[tuple[str, str]], *, as_json: bool, **options: Any
) -> None:
    while True:
        try:
            line = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            raise
        if not line.strip():
            continue
        turn = ("user", line)
        with _refusals_are_usage():
            stream = client.chat([*history, turn], stream=True, **options)
        try:
            answer = _answer(stream, as_json=as_json)
        except KeyboardInterrupt:
            continue
        history += [turn, ("assistant", answer.text)]


@contextlib.contextmanager
def _refusals_are_usage() -> Iterator[None]:
    """What is refused before anything is sent is a wrong command line."""
    try:
        yield
    except InvalidRequestError as error:
        raise click.UsageError(error.message) from error


def _answer(stream: TokenStream, *, as_json: bool) -> Completion:
    has_text = False
    try:
        with stream:
            for chunk in stream:
                if not as_json and chunk.text:
                    click.echo(chunk.text, nl=False)
                    has_text = True
            completion = stream.completion()
    except (BatonError, KeyboardInterrupt):
        if has_text:
            click.echo()  # else the error would stand on the text's own line
        raise
    click.echo(_to_json(completion) if as_json else "")
    return completion


def _to_json(completion: Completion) -> str:
    import msgspec

    return msgspec.json.encode(completion).decode()


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Only what the user said: the server knows the defaults."""
    unsaid = (None, (), "", False)
    return {k: v for k, v in options.items() if not any(v is nothing for nothing in unsaid)}


def _text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and _is_terminal():
        raise click.UsageError("no prompt: give it as an argument, on stdin, or as --prompt-ids")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"the prompt on stdin is not UTF-8: byte {error.start} is "
            f"0x{error.object[error.start]:02x}"
        ) from error


def _token_ids(prompt: str | None, prompt_ids: str) -> list[int]:
    if prompt is not None:
        raise click.UsageError("both a prompt and --prompt-ids were given; give one of them")
    try:
        return [int(item) for item in prompt_ids.split(",") if item.strip()]
    except ValueError:
        raise click.UsageError(
            f"--prompt-ids is {prompt_ids!r}; it must be integers with commas, such as 1,2,3"
        ) from None


def _is_terminal() -> bool:
    return sys.stdin.isatty()
