"""`cloche snapshots`: lists the snapshots of all owners, of the running server or of the data directory."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

import click
import msgspec

from cloche.cli import load_command_config
from cloche.cli.control import connected_client, request_json
from cloche.cli.ps import format_duration, print_table, printable_text
from cloche.config import Config
from cloche.model import KIB, MIB, SnapshotInfo

_COLUMNS = ("ID", "NAME", "OWNER", "SANDBOX", "TEMPLATE", "SIZE", "AGE")


@click.command("snapshots")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the snapshots of all owners, the newest first. `cloche snapshot` makes and removes them."""
    found = _list_snapshots(load_command_config())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        print_table([_COLUMNS, *(_snapshot_row(each, time.time()) for each in found)])


def _list_snapshots(config: Config) -> list[SnapshotInfo]:
    with connected_client(config) as client:
        if client is not None:
            return msgspec.convert(request_json(client, "GET", "/api/v1/snapshots?all=true"), list[SnapshotInfo])
    return asyncio.run(_list_in_engine(config))


def remove_snapshot(config: Config, ref: str) -> None:
    """Removes a snapshot, by its id or name. Raises SnapshotNotFound."""
    with connected_client(config) as client:
        if client is not None:
            request_json(client, "DELETE", f"/api/v1/snapshots/{quote(ref, safe='')}")
            return
    asyncio.run(_remove_in_engine(config, ref))


async def _list_in_engine(config: Config) -> list[SnapshotInfo]:
    from cloche.sdk.assembly import assemble_engine  # here: with a server, none of the engine is needed

    async with assemble_engine(config) as engine:
        return [each.info for each in await engine.snapshots.list(None)]


async def _remove_in_engine(config: Config, ref: str) -> None:
    from cloche.sdk.assembly import assemble_engine

    async with assemble_engine(config) as engine:
        found = await engine.snapshots.get(ref, None)
        await engine.snapshots.remove(found.id, found.owner)


def _snapshot_row(info: SnapshotInfo, now: float) -> tuple[str, ...]:
    size, age = _format_size(info.size_bytes), format_duration(now - info.created_at)
    return info.id, printable_text(info.name or "-"), info.owner, info.sandbox, info.template, size, age


def _format_size(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / KIB:.1f} KiB"
