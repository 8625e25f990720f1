"""`cloche kill`: ends sandboxes of the servers that run."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from cloche import errors
from cloche.cli import configuration
from cloche.cli.control import ask, client_of, no_server, sockets


@click.command("kill")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def command(ids: tuple[str, ...]) -> None:
    """End sandboxes of the running server, of whatever owner. Nothing of them remains."""
    config = configuration()
    found = sockets(config)
    if not found:
        raise no_server(config)
    for id in ids:
        _kill(found, id)
        click.echo(f"killed {id}")


def _kill(found: list[Path], id: str) -> None:
    """Raises what the last server says, if none of them has it."""
    for last, socket in enumerate(found, 1 - len(found)):
        try:
            with client_of(socket) as client:
                ask(client, "DELETE", f"/api/v1/sandboxes/{quote(id, safe='')}")
            return
        except errors.SandboxNotFound:
            if not last:
                raise
