"""`baton status`: who is up, and who holds which blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from baton.cli.server_option import (
    find_secret,
    find_server,
    server_options,
    telling_wrong_secret,
)

if TYPE_CHECKING:
    from baton.client import Client
    from protos.messages import LedgerAudit, ServerInfo

FILE_WIDTH = 200
"""Columns where the output is no terminal: nothing is cut."""


@click.command(short_help="Show servers, blocks and open requests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    help="The cluster's secret.  [default: that of --runtime-dir]",
)
@server_options
def status(server: str | None, runtime_dir: Path, secret_file: Path | None, as_json: bool) -> None:
    """Show the router and its servers: state, blocks by state and by holder, open requests.

    The operator's calls need the cluster's secret.

    \b
    Examples:
      baton status
      baton status --json | jq '.servers[].blocks_by_state'
      baton status --server 10.0.0.5:8000 --secret-file /etc/baton/secret
    """
    from baton.client import Client
    from common.security import load_secret

    path = find_secret(server, secret_file, runtime_dir)
    secret = load_secret(path)
    address = find_server(server, runtime_dir)
    with (
        telling_wrong_secret(path, address),
        Client(address, control_token=secret.control_token()) as client,
    ):
        info = client.info()
        picture = make_picture(info, _ledger(client, info), address)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(picture)).decode())
    else:
        _print_tables(picture)


def _ledger(client: Client, info: ServerInfo) -> LedgerAudit | None:
    """None of a server whose engine is not there yet, or not any more: its state says why."""
    from protos.errors import ServerUnavailableError

    try:
        return client.ledger()
    except ServerUnavailableError:
        if info.state not in ("starting", "dead"):
            raise
        return None


def make_picture(info: ServerInfo, audit: LedgerAudit | None, address: str) -> dict[str, Any]:
    """What `--json` prints. Asked of a single server, there is no router in it."""
    if info.role != "router":
        return {"router": None, "servers": [_entry(info, audit, address, "")]}
    ledgers = {item.name: item for item in audit.servers} if audit else {}
    servers = []
    for server in info.servers:
        found = ledgers.get(server.name)
        error = found.error if found else "the router has no ledger of it"
        servers.append(_entry(server, found.ledger if found else None, server.address, error))
    return {"router": _entry(info, audit, address, ""), "servers": servers}


def _entry(info: ServerInfo, audit: LedgerAudit | None, address: str, error: str) -> dict[str, Any]:
    return {
        "name": info.name,
        "role": info.role,
        "state": info.state,
        "detail": info.detail or error,
        "address": info.address or address,
        "incarnation": f"{info.incarnation:016x}",
        "version": info.version,
        "model": info.model,
        "uptime_s": info.uptime_s,
        "ledger_entries": _sorted(audit.entries_by_state) if audit else None,
        "blocks_by_state": _blocks(info, audit) if audit else None,
        "blocks_by_owner": _sorted(audit.blocks_by_owner) if audit else None,
        "holders": _holders(audit) if audit else None,
        "counters": _sorted(audit.counters) if audit else None,
    }


def _blocks(info: ServerInfo, audit: LedgerAudit) -> dict[str, int]:
    """An engine that is asleep has given its pool's memory back: nothing of it is free."""
    is_asleep = info.state == "asleep"
    return _sorted(
        {
            "released" if is_asleep and state == "free" else state: count
            for state, count in audit.blocks_by_state.items()
        }
    )


def _holders(audit: LedgerAudit) -> dict[str, list[str]]:
    """Every held block's holders by name. JSON's keys are text."""
    return {str(block): list(names) for block, names in sorted(audit.holders.items())}


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    """A map of the wire has no order; a reader wants one."""
    return dict(sorted(counts.items()))


def _print_tables(picture: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for name in ("name", "role", "state", "address", "open", "blocks", "held by"):
        table.add_column(name, no_wrap=True)
    rows = [picture["router"]] if picture["router"] else []
    for row in [*rows, *picture["servers"]]:
        table.add_row(
            row["name"],
            row["role"],
            row["state"],
            row["address"],
            _counts(row["ledger_entries"]),
            _counts(row["blocks_by_state"]),
            _counts(row["blocks_by_owner"]),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table)
    for row in [*rows, *picture["servers"]]:
        if row["detail"]:
            console.print(f"{row['name']}: {row['detail']}", markup=False)


def _counts(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "?"
    return " ".join(f"{name}:{count}" for name, count in counts.items() if count) or "-"
