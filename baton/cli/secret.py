"""`baton secret`: make a cluster's secret file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Make a cluster's secret file.")
@click.argument("path", type=click.Path(path_type=Path))
def secret(path: Path) -> None:
    """Make PATH: a fresh secret that only its owner can read. Never over an old one.

    `baton up` makes its own; a cluster of several hosts needs the same file on
    every one of them, named by secret_file in each configuration.

    \b
    Example:
      baton secret /etc/baton/secret
    """
    from common.security import create_secret
    from protos.errors import ConfigError

    try:
        create_secret(path)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already and is left as it is; move it away, or name another file",
            field="path",
            value=str(path),
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that can be written",
            field="path",
            value=str(path),
        ) from error
    click.echo(f"made {path} (mode 0600); copy it to every host of the cluster")
