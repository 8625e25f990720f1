"""`cloche pause`: stops the programs of sandboxes until they are resumed."""

from __future__ import annotations

from urllib.parse import quote

import click

from cloche.cli import load_command_config
from cloche.cli.control import COPY_SECONDS, apply_to_each, request_any_server


@click.command("pause")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--files", is_flag=True, help="Keep its files only: its programs end, and it takes no memory.")
def command(ids: tuple[str, ...], files: bool) -> None:
    """Stop sandboxes of the running server until they are resumed, of any owner. Their deadlines stop, too."""
    config = load_command_config()

    def pause(id: str) -> None:
        path = f"/api/v1/sandboxes/{quote(id, safe='')}/pause"
        request_any_server(config, "POST", path, {"memory": not files}, seconds=COPY_SECONDS)

    apply_to_each(ids, pause, "paused")
