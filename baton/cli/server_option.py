"""Which server a command asks: `--server`, else the cluster that runs here, else the default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from baton.launch.config import DEFAULT_ROUTER_ADDRESS, DEFAULT_RUNTIME_DIR


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `server` and `runtime_dir`."""
    server = _server_option(
        "The router, or a single server.  [default: the cluster of --runtime-dir, else "
        f"{DEFAULT_ROUTER_ADDRESS}]"
    )
    return server(_runtime_dir(command))


def engine_server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what is asked of an engine: of one server, which must be named."""
    server = _server_option(
        "The context or generation server whose engine it is; `baton status` lists them.", True
    )
    return server(_runtime_dir(command))


def _server_option(
    text: str, is_required: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--server", metavar="HOST:PORT", callback=_check_server, help=text, required=is_required
    )


_runtime_dir = click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_RUNTIME_DIR,
    show_default=True,
    help="Where `baton up` keeps its state.",
)


@contextlib.contextmanager
def telling_wrong_secret(path: Path, address: str) -> Iterator[None]:
    """An AccessDeniedError within then says which secret was tried."""
    from protos.errors import AccessDeniedError

    try:
        yield
    except AccessDeniedError as error:
        raise AccessDeniedError(
            f"the secret {path} does not match that of the cluster at {address}; name the "
            "right one with --secret-file"
        ) from error


def _check_server(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        from baton.stubs import check_address
        from protos.errors import ConfigError

        try:
            check_address(value, "--server")
        except ConfigError as error:
            raise click.UsageError(error.message) from error
    return value


def find_server(server: str | None, runtime_dir: Path) -> str:
    if server is not None:
        return server
    from baton.launch.runtime import read_state

    state = read_state(runtime_dir)
    return DEFAULT_ROUTER_ADDRESS if state is None else state.router


def find_secret(server: str | None, secret_file: Path | None, runtime_dir: Path) -> Path:
    """Raises ServerUnavailableError where no cluster runs here and none was named,
    ConfigError where one was named without its secret.
    """
    if secret_file is not None:
        return secret_file
    from baton.launch.runtime import read_state
    from protos.errors import ConfigError, ServerUnavailableError

    state = read_state(runtime_dir)
    if state is not None:
        return Path(state.secret_file)
    if server is None:
        raise ServerUnavailableError(
            f"no cluster runs here (runtime dir {runtime_dir}); name another folder with "
            "--runtime-dir, or a cluster elsewhere with --server and --secret-file"
        )
    path = runtime_dir / "secret"
    if not path.exists():
        raise ConfigError(
            f"there is no secret {path}; name that of the cluster at {server} with --secret-file",
            field="secret_file",
            value=str(path),
        )
    return path
