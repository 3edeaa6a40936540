"""`baton engine`: what an operator asks of one server's engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from baton.cli.server_option import engine_server_options, find_secret, telling_wrong_secret

if TYPE_CHECKING:
    from baton.operator import EngineOperator, TraceFile

MARGIN_S = 10.0
"""How long after its time the engine may wait for this command to stop a profile."""
_SECRET = click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    help="The cluster's secret.  [default: that of --runtime-dir]",
)


def _of_one_server(command: Callable[..., Any]) -> Callable[..., Any]:
    return engine_server_options(_SECRET(command))


@click.group(short_help="Sleep, wake up or profile one server's engine.")
def engine() -> None:
    """Ask something of one server's engine; a router has none. `baton status` lists the servers.

    \b
    Examples:
      baton engine sleep --server 127.0.0.1:8101
      baton engine profile /tmp/trace.json --seconds 5 --server 127.0.0.1:8101
    """


@engine.command()
@_of_one_server
def sleep(server: str, runtime_dir: Path, secret_file: Path | None) -> None:
    """Release the weights and the KV pool until `wake-up`; refused while it serves."""
    with _operator(server, runtime_dir, secret_file) as operator:
        operator.sleep()
    click.echo("asleep")


@engine.command("wake-up")
@_of_one_server
def wake_up(server: str, runtime_dir: Path, secret_file: Path | None) -> None:
    """Load the weights again and serve."""
    with _operator(server, runtime_dir, secret_file) as operator:
        operator.wake_up()
    click.echo("awake")


@engine.command()
@click.argument("path")
@click.option("--seconds", type=click.FloatRange(0, 600), default=5.0, show_default=True)
@_of_one_server
def profile(
    path: str, seconds: float, server: str, runtime_dir: Path, secret_file: Path | None
) -> None:
    """Record the engine's steps for a while into PATH, an absolute path on the server's host.

    Where this command is killed, the engine ends the recording by itself soon after.
    """
    with _operator(server, runtime_dir, secret_file) as operator:
        operator.start_profile(path, seconds + MARGIN_S)
        try:
            time.sleep(seconds)
        finally:  # Ctrl-C ends the recording, not the trace
            for file in operator.stop_profile():
                click.echo(_told(file, seconds))


def _told(file: TraceFile, asked_s: float) -> str:
    told = f"{file.path}: {file.num_steps} steps, {file.num_bytes} bytes"
    if not file.is_full:
        return told
    return (
        f"{told}; it was full after {file.recorded_s:.2g} s of {asked_s:g} s: the rest is not in it"
    )


@engine.command("load-lora")
@click.argument("name")
@click.argument("path")
@_of_one_server
def load_lora(
    name: str, path: str, server: str, runtime_dir: Path, secret_file: Path | None
) -> None:
    """Load a LoRA adapter from PATH on the server's host, where the engine has LoRA."""
    with _operator(server, runtime_dir, secret_file) as operator:
        operator.load_lora(name, path)
    click.echo(f"loaded {name}")


@engine.command("unload-lora")
@click.argument("name")
@_of_one_server
def unload_lora(name: str, server: str, runtime_dir: Path, secret_file: Path | None) -> None:
    """Unload a LoRA adapter."""
    with _operator(server, runtime_dir, secret_file) as operator:
        operator.unload_lora(name)
    click.echo(f"unloaded {name}")


@engine.command()
@_of_one_server
def loras(server: str, runtime_dir: Path, secret_file: Path | None) -> None:
    """List the LoRA adapters that are loaded, a line each."""
    with _operator(server, runtime_dir, secret_file) as operator:
        for lora in operator.list_loras():
            click.echo(f"{lora.name}\t{lora.path}")


@contextlib.contextmanager
def _operator(server: str, runtime_dir: Path, secret_file: Path | None) -> Iterator[EngineOperator]:
    from baton.operator import EngineOperator
    from common.security import load_secret

    path = find_secret(server, secret_file, runtime_dir)
    secret = load_secret(path)
    with (
        telling_wrong_secret(path, server),
        EngineOperator(server, control_token=secret.control_token()) as operator,
    ):
        yield operator
