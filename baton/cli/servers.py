"""`baton router`, `baton context`, `baton generation`: one process each, in the foreground."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

_CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The process's YAML file.",
)
_LOG_LEVEL = click.option("--log-level", help="Over the file's log_level.")


@click.command(short_help="Run a router, from its file.")
@_CONFIG
@_LOG_LEVEL
def router(config: Path, log_level: str | None) -> None:
    """Run a router: it takes the requests and hands them to the servers of its file.

    \b
    Example:
      baton router --config configs/router.yaml
    """
    _run("router", config, log_level)


@click.command(short_help="Run a context server, from its file.")
@_CONFIG
@_LOG_LEVEL
def context(config: Path, log_level: str | None) -> None:
    """Run a context server: it turns prompts into KV cache and a first token.

    \b
    Example:
      baton context --config configs/context.yaml
    """
    _run("context_server", config, log_level)


@click.command(short_help="Run a generation server, from its file.")
@_CONFIG
@_LOG_LEVEL
def generation(config: Path, log_level: str | None) -> None:
    """Run a generation server: it takes the KV cache over and streams the other tokens.

    \b
    Example:
      baton generation --config configs/generation.yaml
    """
    _run("generation_server", config, log_level)


def _run(package: str, config: Path, log_level: str | None) -> None:
    arguments = ["--config", str(config)]
    if log_level is not None:
        arguments += ["--log-level", log_level]
    sys.exit(importlib.import_module(f"{package}.__main__").main(arguments))
