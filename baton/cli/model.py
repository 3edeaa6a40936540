"""`baton model`: models that Baton knows where to find."""

from __future__ import annotations

import click


@click.group(short_help="Find the demo model.")
def model() -> None:
    """Find a model's folder."""


@model.command()
def demo() -> None:
    """Print the demo model's folder (SmolLM2-135M-Instruct); converted the first time.

    \b
    Examples:
      baton model demo
      baton context --config my.yaml   # with engine.model set to that folder
    """
    from baton.demo_model import demo_model_folder

    click.echo(demo_model_folder(progress=lambda line: click.echo(line, err=True)))
