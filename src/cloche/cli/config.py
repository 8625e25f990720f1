"""`cloche config`: every key, its value, and where it came from."""

from __future__ import annotations

import json

import click

from cloche.cli import configuration


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print the configuration and where each value came from."""
    rows = list(configuration().items())
    if as_json:
        click.echo(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2))
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        click.echo(f"{key:<{width}} = {json.dumps(value)}  # {origin}")
