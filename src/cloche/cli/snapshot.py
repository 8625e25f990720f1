"""`cloche snapshot`: keeps what is in a sandbox, to make new ones from."""

from __future__ import annotations

from urllib.parse import quote

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import COPY_SECONDS, ask_around, do_each, going_on
from cloche.cli.snapshots import removed
from cloche.model import SnapshotInfo

_REMOVE = "rm"


@click.command("snapshot")
@click.argument("words", metavar="ID [NAME] | rm SNAPSHOT...", nargs=-1, required=True)
def command(words: tuple[str, ...]) -> None:
    """Keep the files and environment of sandbox ID as they are now, and print the snapshot's id.

    `cloche run --template SNAPSHOT`, with its id or NAME, begins there; `cloche snapshots` lists them. The snapshot
    belongs to whom the sandbox does. With rm, remove snapshots instead.
    """
    if words[0] == _REMOVE:
        _remove(words[1:])
    elif len(words) > 2:
        raise click.UsageError("give the ID of a sandbox and, if you like, one NAME")
    else:
        _make(*words)


def _make(id: str, name: str | None = None) -> None:
    path = f"/api/v1/sandboxes/{quote(id, safe='')}/snapshots"
    with going_on():
        made = ask_around(configuration(), "POST", path, {"name": name}, seconds=COPY_SECONDS)
    click.echo(msgspec.convert(made, SnapshotInfo).id)


def _remove(refs: tuple[str, ...]) -> None:
    if not refs:
        raise click.UsageError("give the id or name of a snapshot")
    config = configuration()
    do_each(refs, lambda ref: removed(config, ref), "removed")
