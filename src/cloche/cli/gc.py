"""`cloche gc`: removes unused data from the data directory; servers may run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click
import msgspec

from cloche.cli import EXIT_CLOCHE_FAILED, load_command_config
from cloche.cli.control import existing_data_dir
from cloche.engine.instance import Instance, has_live_instance
from cloche.model import GIB, KIB, MIB

if TYPE_CHECKING:
    from cloche.engine.operations.gc import CollectedItem


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only list the data that would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, dry_run: bool, as_json: bool) -> None:
    """Remove old versions of templates, and the remains of killed processes.

    A server does the same at its start and every hour. Data that a process uses is never removed. If something could
    not be checked, it is named, and the status is 125.
    """
    from cloche.engine.operations.gc import SERVED_VACUUM_BYTES, GarbageCollector  # here: it takes a while to import

    config = load_command_config()
    run_dir = existing_data_dir(config) / "run"
    vacuum_bytes = SERVED_VACUUM_BYTES if has_live_instance(run_dir) else math.inf
    work = GarbageCollector(config, Instance(run_dir).is_live, dry=dry_run, compact=True, vacuum_bytes=vacuum_bytes)
    found = work.run()
    _print_findings(found, dry_run, as_json)
    for why in work.failed:
        where = f"not everything in {config.data_dir} could be checked"
        click.echo(f"cloche: {where}: {why}; mend this, or name another with --data-dir", err=True)
    if work.failed:
        ctx.exit(EXIT_CLOCHE_FAILED)


def _print_findings(found: list[CollectedItem], dry_run: bool, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode([each._asdict() for each in found]).decode())
        return
    for each in found:
        name = each.name or f"{each.things} of them"
        click.echo(f"{each.kind:<11} {name}  {format_size(each.bytes)}  {each.why}")
    what = "would go" if dry_run else "gone"
    click.echo(f"{sum(each.things for each in found)} things {what}, {format_size(sum(each.bytes for each in found))}")


def format_size(size: int) -> str:
    """Formats a size for people."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
