"""The commands, put together."""

from __future__ import annotations

import click

import baton
from baton.cli.ask import chat, generate
from baton.cli.doctor import doctor
from baton.cli.engine import engine
from baton.cli.group import BatonGroup
from baton.cli.model import model
from baton.cli.secret import secret
from baton.cli.servers import context, generation, router, worker
from baton.cli.status import status
from baton.cli.up import up


@click.group(
    cls=BatonGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(baton.__version__, prog_name="baton")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Serve a language model with prefill and decode on different servers.

    \b
    A first try, with the demo model:
      baton up                          # in one terminal; Ctrl-C stops it
      baton generate "Once upon a time" --max-tokens 32   # in another one
      baton status

    Every command explains itself: baton COMMAND --help.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (
    up,
    router,
    context,
    generation,
    worker,
    generate,
    chat,
    status,
    engine,
    doctor,
    model,
    secret,
):
    app.add_command(command)


def main() -> None:
    app(prog_name="baton")
