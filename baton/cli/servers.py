"""`baton router`, `context`, `generation` and `worker`: one server each, in the foreground."""

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
_FRONTENDS = click.option(
    "--frontends",
    type=int,
    metavar="N",
    help="Serving processes that share the engine and the port.  [default: the file's, or 1]",
)


@click.command(short_help="Run a router, from its file.")
@_CONFIG
@_LOG_LEVEL
def router(config: Path, log_level: str | None) -> None:
    """Run a router: it takes the requests and hands them to the servers of its file.

    \b
    Example:
      baton router --config configs/router.yaml
    """
    _run("router.__main__", config, log_level)


@click.command(short_help="Run a context server, from its file.")
@_CONFIG
@_FRONTENDS
@_LOG_LEVEL
def context(config: Path, frontends: int | None, log_level: str | None) -> None:
    """Run a context server: it turns prompts into KV cache and a first token.

    \b
    Examples:
      baton context --config configs/context.yaml
      baton context --config configs/context.yaml --frontends 3
    """
    _run("context_server.__main__", config, log_level, frontends=frontends)


@click.command(short_help="Run a generation server, from its file.")
@_CONFIG
@_FRONTENDS
@_LOG_LEVEL
def generation(config: Path, frontends: int | None, log_level: str | None) -> None:
    """Run a generation server: it takes the KV cache over and streams the other tokens.

    \b
    Example:
      baton generation --config configs/generation.yaml
    """
    _run("generation_server.__main__", config, log_level, frontends=frontends)


@click.command(short_help="Run an engine alone, for servers elsewhere.")
@_CONFIG
@click.option("--listen", metavar="HOST:PORT", help="Over the file's listen.")
@_LOG_LEVEL
def worker(config: Path, listen: str | None, log_level: str | None) -> None:
    """Run an engine that servers of other processes or hosts attach to: those whose
    engine.executor.rpc_address names it. Several may share it.

    \b
    Examples:
      baton worker --config configs/worker.yaml --listen 10.0.0.5:8301
      mpirun -n 2 python -m executor.world.under_mpi baton worker --config worker.yaml
    """
    _run("executor.attach.worker_server", config, log_level, listen=listen)


def _run(module: str, config: Path, log_level: str | None, **more: object) -> None:
    arguments = ["--config", str(config)]
    for name, value in {"log-level": log_level, **more}.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    sys.exit(importlib.import_module(module).main(arguments))
