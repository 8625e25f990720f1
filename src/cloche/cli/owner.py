"""`cloche owner`: erases an owner, at all running servers and in the data directory."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from cloche import errors
from cloche.cli import EXIT_CLOCHE_FAILED, load_command_config
from cloche.cli.control import COPY_SECONDS, control_sockets, existing_data_dir, open_client, request_json
from cloche.cli.names import parse_owner_option
from cloche.config import Config
from cloche.engine.instance import Instance, find_instance_pid
from cloche.store import audit, erasure
from cloche.store.database import Database


@click.group("owner")
def command() -> None:
    """Remove all data of an owner."""


@command.command("erase")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--audit", "forget", is_flag=True, help="Also replace the name by a pseudonym in the audit log.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def erase_command(ctx: click.Context, name: str, yes: bool, forget: bool, as_json: bool) -> None:
    """End an owner's sandboxes, and remove the owner's stored data and keys.

    It can be repeated without harm: for an unknown owner nothing is removed.
    """
    config = load_command_config()
    existing_data_dir(config)
    if name != config.librechat.jwt.owner:
        parse_owner_option(ctx, ctx.command.params[0], name)
    if not yes:
        click.confirm(f"Remove all sandboxes, snapshots, volumes, files and keys of {name!r}?", abort=True, err=True)
    told, pids = _erase_owner(config, name, forget)
    click.echo(msgspec.json.format(msgspec.json.encode(told)).decode() if as_json else _format_report(told))
    if told["left"]:
        rows = ", ".join(f"{count} {table}" for table, count in told["left"].items())
        which = f" (pid {', '.join(map(str, pids))})" if pids else ""
        click.echo(f"cloche: another process{which} uses {rows}: end it, and repeat the command", err=True)
        ctx.exit(EXIT_CLOCHE_FAILED)
    if not told["removed"] and not told["sandboxes_ended"]:
        click.echo(f"cloche: nothing is known of an owner {name!r}: `cloche key list` shows owners", err=True)


def _erase_owner(config: Config, name: str, forget: bool) -> tuple[dict[str, Any], list[int]]:
    """Erases at every server, then without one, since a process may have died meanwhile.

    Returns the report, and the pids of processes that still use something of the owner.
    """
    path = f"/admin/owners/{quote(name, safe='')}?audit={'true' if forget else 'false'}"
    removed: Counter[str] = Counter()
    ended = lines = 0
    for socket in control_sockets(config):
        with open_client(socket, COPY_SECONDS) as client:
            told = request_json(client, "DELETE", path)
        removed.update(told["removed"])
        ended, lines = ended + told["sandboxes_ended"], lines + told["audit_lines"]
    here, left, live = asyncio.run(_erase_in_store(config, name))
    removed.update(here)
    lines += _record_erasure(config, name, forget, bool(control_sockets(config)))
    pids = [pid for each in live if (pid := find_instance_pid(Path(config.data_dir, "run"), each)) is not None]
    told = {"owner": name, "sandboxes_ended": ended, "removed": removed, "left": left, "audit_lines": lines}
    return told, sorted(pids)


async def _erase_in_store(config: Config, name: str) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Returns the removed counts, the remaining counts, and the running host processes with data of the owner."""
    data_dir = Path(config.data_dir)
    if not (data_dir / "store.sqlite3").exists():
        return {}, {}, []
    is_live = Instance(data_dir / "run").is_live
    database = Database(data_dir / "store.sqlite3")
    await database.open()
    try:
        live = [each for each in await database.do(lambda db: erasure.find_instances(db, name)) if is_live(each)]
        removed = await database.do(lambda db: erasure.erase_owner(db, data_dir, name, live))
        left = await database.do(lambda db: erasure.count_left(db, name, live))
        database.scrub_log()
        return removed, left, live
    except (OSError, sqlite3.Error) as error:
        raise errors.Unavailable(f"not all data of {name!r} could be removed: {error}; repeat the command") from None
    finally:
        await database.aclose()


def _record_erasure(config: Config, name: str, forget: bool, served: bool) -> int:
    """Records the erasure where no server has; with `forget`, replaces the name in the log by a pseudonym."""
    directory = Path(config.data_dir, "audit")
    try:
        told = audit.make_pseudonym(name, audit.load_salt(directory)) if forget else name
        lines = audit.pseudonymize_owner(directory, name) if forget else 0
        if not served and config.audit.enabled:
            said = audit.AuditLine(
                at=audit.format_time(time.time()), what="owner.erased", owner=told, by="local", key="local"
            )
            audit.append_once(directory, config.audit.max_bytes, [said])
        return lines
    except OSError as error:
        raise errors.Unavailable(f"the audit log cannot be written: {error}") from None


def _format_report(told: dict[str, Any]) -> str:
    removed = dict(told["removed"])
    size = removed.pop("file_bytes", 0)
    rows = ", ".join(f"{count} {table}" for table, count in sorted(removed.items())) or "nothing"
    return f"{told['owner']}: {told['sandboxes_ended']} sandboxes ended; removed {rows}; {size} bytes of files"
