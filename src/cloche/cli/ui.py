"""`cloche ui`: prints a login link for the console of the running server."""

from __future__ import annotations

import webbrowser

import click

from cloche.cli import load_command_config
from cloche.cli.control import connected_client, no_server_error, request_json


@click.command("ui")
@click.option("--open", "opens", is_flag=True, help="Open it in a browser, too.")
def command(opens: bool) -> None:
    """Print a link that opens the console of the running server once, within a quarter of an hour."""
    config = load_command_config()
    with connected_client(config) as client:
        if client is None:
            raise no_server_error(config)
        url = str(request_json(client, "POST", "/ui/login/links")["url"])
    click.echo(url)
    if opens and not webbrowser.open(url):
        click.echo("cloche: no browser was found here: open the link yourself", err=True)
