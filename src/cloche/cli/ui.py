"""`cloche ui`: a link into the console of the server that runs."""

from __future__ import annotations

import webbrowser

import click

from cloche.cli import configuration
from cloche.cli.control import ask, connected, no_server


@click.command("ui")
@click.option("--open", "opens", is_flag=True, help="Open it in a browser, too.")
def command(opens: bool) -> None:
    """Print a link that opens the console of the running server once, within a quarter of an hour."""
    config = configuration()
    with connected(config) as client:
        if client is None:
            raise no_server(config)
        url = str(ask(client, "POST", "/ui/login/links")["url"])
    click.echo(url)
    if opens and not webbrowser.open(url):
        click.echo("cloche: no browser was found here: open the link yourself", err=True)
