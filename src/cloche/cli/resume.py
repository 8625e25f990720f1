"""`cloche resume`: resumes paused sandboxes."""

from __future__ import annotations

from urllib.parse import quote

import click

from cloche.cli import load_command_config
from cloche.cli.control import COPY_SECONDS, apply_to_each, request_any_server


@click.command("resume")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=float, metavar="SECONDS", help="Lifetime from now on.  [default: the original one]")
def command(ids: tuple[str, ...], timeout: float | None) -> None:
    """Resume paused sandboxes of the running server, of any owner."""
    config = load_command_config()

    def resume(id: str) -> None:
        path = f"/api/v1/sandboxes/{quote(id, safe='')}/resume"
        request_any_server(config, "POST", path, {"timeout_seconds": timeout}, seconds=COPY_SECONDS)

    apply_to_each(ids, resume, "resumed")
