"""How every command fails: one line on stderr that says what to do, and an exit code.

0  done          2  wrong usage or a configuration that cannot work
1  it failed     130  Ctrl-C
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from protos.errors import BatonError, ConfigError, ServerUnavailableError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class BatonGroup(click.Group):
    """Translates whatever a command raises."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.UsageError as error:
            where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            code = _fail(f"{error.format_message()}{where}", EXIT_USAGE)
        except click.ClickException as error:
            code = _fail(error.format_message(), EXIT_USAGE)
        except ConfigError as error:
            code = _fail(error.message, EXIT_USAGE)
        except BatonError as error:
            code = _fail(_told(error), EXIT_FAILED)
        except (KeyboardInterrupt, click.Abort):
            code = EXIT_INTERRUPTED
        except BrokenPipeError:
            # Whoever read our output left; nobody is there to be told.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_FAILED
        sys.exit(code if isinstance(code, int) else 0)


def _told(error: BatonError) -> str:
    """With a remedy only where nobody answers: a router without servers is up already."""
    if isinstance(error, ServerUnavailableError) and error.field == "address":
        remedy = "`baton up` starts a cluster here, --server names one elsewhere"
        return f"nobody answers at {error.value}; {remedy}"
    return error.message


def _fail(message: str, code: int) -> int:
    click.echo(f"baton: {message}", err=True)
    return code
