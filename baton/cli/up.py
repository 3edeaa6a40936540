"""`baton up`: a whole cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from baton.cli.group import EXIT_FAILED, EXIT_USAGE
from baton.launch.config import ClusterConfig, Flags, with_flags


@click.command(short_help="Start a whole cluster on this machine.")
@click.option("--config", type=click.Path(path_type=Path), help="A cluster's YAML file.")
@click.option("--model", help="A Hugging Face folder, a GGUF file, or 'demo'.  [default: demo]")
@click.option("--context", "num_context", type=int, help="Number of context servers.  [default: 1]")
@click.option(
    "--generation", "num_generation", type=int, help="Number of generation servers.  [default: 1]"
)
@click.option("--port", type=int, help="The router's port.  [default: 8000]")
@click.option("--dtype", help="float32 or bfloat16.  [default: float32]")
@click.option("--device", help="cpu or cuda.  [default: cpu]")
@click.option(
    "--tls", "ucx_tls", metavar="LIST", help="UCX transports: 'tcp,self' keeps shared memory out."
)
@click.option("--runtime-dir", help="Logs, secret and state.  [default: .baton]")
def up(config: Path | None, **flags: Any) -> None:
    """Start a router, context servers and generation servers; Ctrl-C stops all of them.

    Flags win over the file. Where a process dies, the others are stopped, and
    its last log lines are shown.

    \b
    Examples:
      baton up
      baton up --model ./Qwen3-0.6B --generation 2 --port 9000
      baton up --config configs/local.yaml
    """
    from common.config import load_config

    base = ClusterConfig() if config is None else load_config(config, ClusterConfig)
    run_cluster(with_flags(base, Flags(**flags)))


def run_cluster(config: ClusterConfig) -> None:
    """Returns after a signal; where a process died, says so and exits with EXIT_FAILED.

    Where one cannot work as it is configured, the exit code is EXIT_USAGE.
    """
    from baton.launch.cluster import Cluster
    from baton.launch.interrupt import interrupts
    from protos.errors import BatonError, ConfigError

    with interrupts() as interrupt:
        cluster = Cluster(config, click.echo, interrupt)
        is_orderly = False
        try:
            cluster.start()
            click.echo(_welcome(cluster.address, config.runtime_dir))
            cluster.watch()
            is_orderly = True
        except KeyboardInterrupt:
            is_orderly = True
        except BatonError as error:
            if not cluster.children:
                raise
            # Told now and not at the end: stopping the others may take its time.
            if isinstance(error, ConfigError):
                click.echo(f"baton: {error.message}", err=True)
                raise click.exceptions.Exit(EXIT_USAGE) from error
            click.echo(f"baton: {error.message}\nstopping the others", err=True)
            raise click.exceptions.Exit(EXIT_FAILED) from error
        finally:
            if is_orderly:
                click.echo("stopping")
            cluster.stop(in_order=is_orderly)
    click.echo("stopped")


def _welcome(address: str, runtime_dir: str) -> str:
    where = "" if runtime_dir == ".baton" else f" --runtime-dir {runtime_dir}"
    return (
        f"up: the router listens on {address}; Ctrl-C stops the cluster\n"
        f'  try: baton generate "Once upon a time" --max-tokens 32{where}'
    )
