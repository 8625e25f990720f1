"""`cloche gc`: removing what nobody needs from the data directory; servers may run."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from cloche.cli import configuration
from cloche.engine.instance import Instance
from cloche.model import GIB, KIB, MIB


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(dry_run: bool, as_json: bool) -> None:
    """Remove old versions of templates, and what processes left that were killed.

    A server does the same at its start and every hour. Nothing goes that any process uses.
    """
    from cloche.engine.collection import Collection  # here: it takes a while to import

    config = configuration()
    is_live = Instance(Path(config.data_dir, "run")).is_live
    found = Collection(config, is_live, dry=dry_run, compact=True).run()
    if as_json:
        click.echo(msgspec.json.encode([each._asdict() for each in found]).decode())
        return
    for each in found:
        name = each.name or f"{each.things} of them"
        click.echo(f"{each.kind:<11} {name}  {size_of(each.bytes)}  {each.why}")
    what = "would go" if dry_run else "gone"
    click.echo(f"{sum(each.things for each in found)} things {what}, {size_of(sum(each.bytes for each in found))}")


def size_of(size: int) -> str:
    """As people read it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
