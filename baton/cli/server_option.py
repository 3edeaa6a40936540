"""Which server a command asks: `--server`, else the cluster that runs here, else the default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from baton.launch.config import DEFAULT_ROUTER_ADDRESS, DEFAULT_RUNTIME_DIR


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `server` and `runtime_dir`."""
    runtime_dir = click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path),
        default=DEFAULT_RUNTIME_DIR,
        show_default=True,
        help="Where `baton up` keeps its state.",
    )
    server = click.option(
        "--server",
        metavar="HOST:PORT",
        help="The router, or a single server.  [default: the cluster of --runtime-dir, else "
        f"{DEFAULT_ROUTER_ADDRESS}]",
    )
    return server(runtime_dir(command))


def find_server(server: str | None, runtime_dir: Path) -> str:
    if server is not None:
        return server
    from baton.launch.runtime import read_state

    state = read_state(runtime_dir)
    return DEFAULT_ROUTER_ADDRESS if state is None else state.router


def find_secret(secret_file: Path | None, runtime_dir: Path) -> Path:
    if secret_file is not None:
        return secret_file
    from baton.launch.runtime import read_state

    state = read_state(runtime_dir)
    return runtime_dir / "secret" if state is None else Path(state.secret_file)
