"""`cloche kill`: ends sandboxes of the running servers."""

from __future__ import annotations

from urllib.parse import quote

import click

from cloche.cli import load_command_config
from cloche.cli.control import apply_to_each, request_any_server


@click.command("kill")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def command(ids: tuple[str, ...]) -> None:
    """End sandboxes of the running server, of any owner, including paused ones, and remove them completely."""
    config = load_command_config()
    apply_to_each(
        ids, lambda id: request_any_server(config, "DELETE", f"/api/v1/sandboxes/{quote(id, safe='')}"), "killed"
    )
