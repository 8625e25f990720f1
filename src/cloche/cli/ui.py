"""`cloche ui`: a link that logs in at the console of the running server."""

from __future__ import annotations

import click

from cloche.cli import configuration
from cloche.cli.control import ask, connected, no_server


@click.command("ui")
def command() -> None:
    """Print a link that opens the console in a browser, once, as the server's admin."""
    config = configuration()
    with connected(config) as client:
        if client is None:
            raise no_server(config)
        told = ask(client, "POST", "/ui/login/links")
    click.echo(told["url"])
    if told["seconds"]:
        click.echo(f"cloche: it logs in once, within {told['seconds'] / 60:g} minutes", err=True)
