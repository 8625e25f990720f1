"""`cloche snapshot`: saves the files of a sandbox as a template for new ones."""

from __future__ import annotations

from urllib.parse import quote

import click
import msgspec

from cloche.cli import load_command_config
from cloche.cli.control import COPY_SECONDS, apply_to_each, request_any_server, warn_on_interrupt
from cloche.cli.snapshots import remove_snapshot
from cloche.model import SnapshotInfo

_REMOVE_WORD = "rm"


@click.command("snapshot")
@click.argument("words", metavar="ID [NAME] | rm SNAPSHOT...", nargs=-1, required=True)
def command(words: tuple[str, ...]) -> None:
    """Save the current files and environment of sandbox ID, and print the snapshot's id.

    `cloche run --template SNAPSHOT`, with its id or NAME, starts from it; `cloche snapshots` lists them. The snapshot
    belongs to the owner of the sandbox. With rm, remove snapshots instead.
    """
    if words[0] == _REMOVE_WORD:
        _remove_snapshots(words[1:])
    elif len(words) > 2:
        raise click.UsageError("give the ID of a sandbox and, if you like, one NAME")
    else:
        _make_snapshot(*words)


def _make_snapshot(id: str, name: str | None = None) -> None:
    path = f"/api/v1/sandboxes/{quote(id, safe='')}/snapshots"
    with warn_on_interrupt():
        made = request_any_server(load_command_config(), "POST", path, {"name": name}, seconds=COPY_SECONDS)
    click.echo(msgspec.convert(made, SnapshotInfo).id)


def _remove_snapshots(refs: tuple[str, ...]) -> None:
    if not refs:
        raise click.UsageError("give the id or name of a snapshot")
    config = load_command_config()
    apply_to_each(refs, lambda ref: remove_snapshot(config, ref), "removed")
