"""`cloche fork`: makes more sandboxes with the files of one."""

from __future__ import annotations

from urllib.parse import quote

import click
import msgspec

from cloche.cli import load_command_config
from cloche.cli.control import COPY_SECONDS, request_any_server
from cloche.model import SandboxInfo


@click.command("fork")
@click.argument("id")
@click.option("-n", "--count", type=int, default=1, show_default=True, help="Number of sandboxes.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Their lifetime.  [default: the original one of ID]")
def command(id: str, count: int, timeout: float | None) -> None:
    """Create sandboxes with the files and environment of sandbox ID, which continues to run, and print their ids."""
    path, asked = f"/api/v1/sandboxes/{quote(id, safe='')}/fork", {"count": count, "timeout_seconds": timeout}
    made = request_any_server(load_command_config(), "POST", path, asked, seconds=COPY_SECONDS)
    for each in msgspec.convert(made, list[SandboxInfo]):
        click.echo(each.id)
