"""`cloche resume`: lets paused sandboxes go on."""

from __future__ import annotations

from urllib.parse import quote

import click

from cloche.cli import configuration
from cloche.cli.control import COPY_SECONDS, ask_around, do_each


@click.command("resume")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=float, metavar="SECONDS", help="For so long.  [default: as it was first given]")
def command(ids: tuple[str, ...], timeout: float | None) -> None:
    """Let paused sandboxes of the running server go on, of whatever owner."""
    config = configuration()

    def resume(id: str) -> None:
        path = f"/api/v1/sandboxes/{quote(id, safe='')}/resume"
        ask_around(config, "POST", path, {"timeout_seconds": timeout}, seconds=COPY_SECONDS)

    do_each(ids, resume, "resumed")
