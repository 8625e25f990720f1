"""`cloche kill`: ends sandboxes of the servers that run."""

from __future__ import annotations

from urllib.parse import quote

import click

from cloche.cli import configuration
from cloche.cli.control import ask_around, do_each


@click.command("kill")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def command(ids: tuple[str, ...]) -> None:
    """End sandboxes of the running server, of whatever owner, also paused ones. Nothing of them remains."""
    config = configuration()
    do_each(ids, lambda id: ask_around(config, "DELETE", f"/api/v1/sandboxes/{quote(id, safe='')}"), "killed")
