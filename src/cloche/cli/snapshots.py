"""`cloche snapshots`: those of all owners. From the running server, else from the data directory itself."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import ask, connected
from cloche.cli.ps import duration, printable, table
from cloche.config import Config
from cloche.model import KIB, MIB, SnapshotInfo

_HEAD = ("ID", "NAME", "OWNER", "SANDBOX", "TEMPLATE", "SIZE", "AGE")


@click.command("snapshots")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the snapshots of all owners, the newest first. `cloche snapshot` makes and removes them."""
    found = _found(configuration())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        table([_HEAD, *(_row(each, time.time()) for each in found)])


def _found(config: Config) -> list[SnapshotInfo]:
    with connected(config) as client:
        if client is not None:
            return msgspec.convert(ask(client, "GET", "/api/v1/snapshots?all=true"), list[SnapshotInfo])
    return asyncio.run(_here(config))


def removed(config: Config, ref: str) -> None:
    """Removes a snapshot, by its id or name. Raises SnapshotNotFound."""
    with connected(config) as client:
        if client is not None:
            ask(client, "DELETE", f"/api/v1/snapshots/{quote(ref, safe='')}")
            return
    asyncio.run(_remove_here(config, ref))


async def _here(config: Config) -> list[SnapshotInfo]:
    from cloche.sdk.assembly import assemble  # here: with a server, none of the engine is needed

    async with assemble(config) as engine:
        return [each.info for each in await engine.snapshots.list(None)]


async def _remove_here(config: Config, ref: str) -> None:
    from cloche.sdk.assembly import assemble

    async with assemble(config) as engine:
        found = await engine.snapshots.get(ref, None)
        await engine.snapshots.remove(found.id, found.owner)


def _row(info: SnapshotInfo, now: float) -> tuple[str, ...]:
    size, age = _size(info.size_bytes), duration(now - info.created_at)
    return info.id, printable(info.name or "-"), info.owner, info.sandbox, info.template, size, age


def _size(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / KIB:.1f} KiB"
