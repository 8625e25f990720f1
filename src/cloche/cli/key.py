"""`cloche key`: who may use the server. Over its control socket where one runs, else in the store itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import ask, connected
from cloche.store.database import Database
from cloche.store.keys import KeyRecord, StoredKeys

T = TypeVar("T")


@click.group("key")
def command() -> None:
    """Add, list, rotate and revoke API keys."""


@command.command("add")
@click.option("--owner", default="local", help="To whom sandboxes made with it belong; by default local.")
@click.option("--role", type=click.Choice(["user", "admin"]), default="user", help="By default user.")
@click.option("--name", default="", help="What it is for, in your own words.")
def add_command(owner: str, role: str, name: str) -> None:
    """Make a key and print it, this once."""
    asked = {"owner": owner, "role": role, "name": name}
    _tell(_do("POST", "/admin/keys", asked, lambda keys: _told(keys.add(owner, role, name))))


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List all keys, also revoked ones; never the keys themselves."""
    records = msgspec.convert(_do("GET", "/admin/keys", None, _listed), list[KeyRecord])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(records)))
        return
    if not records:
        click.echo("no keys yet: `cloche serve` makes a first one, `cloche key add` others", err=True)
    for each in records:
        state = f"revoked {_day(each.revoked_at)}" if each.revoked_at else f"used {_day(each.last_used_at)}"
        click.echo(f"{each.id}  {each.role:<5}  {each.owner:<16}  made {_day(each.created_at)}  {state}  {each.name}")


@command.command("rotate")
@click.argument("id")
def rotate_command(id: str) -> None:
    """Make a new key in the place of one, which stops; its owner keeps everything."""
    _tell(_do("POST", f"/admin/keys/{quote(id, safe='')}/rotate", None, lambda keys: _told(keys.rotate(id))))


@command.command("revoke")
@click.argument("id")
def revoke_command(id: str) -> None:
    """Stop a key, at once."""
    _do("DELETE", f"/admin/keys/{quote(id, safe='')}", None, lambda keys: keys.revoke(id))
    click.echo(f"revoked {id}", err=True)


def _do(method: str, path: str, body: Any, directly: Callable[[StoredKeys], Awaitable[Any]]) -> Any:
    with connected(configuration()) as client:
        if client is not None:
            return ask(client, method, path, body)
    return asyncio.run(_in_store(directly))


async def _in_store(work: Callable[[StoredKeys], Awaitable[T]]) -> T:
    async with StoredKeys(Database(Path(configuration().data_dir) / "store.sqlite3")) as keys:
        return await work(keys)


async def _told(made: Awaitable[tuple[KeyRecord, str]]) -> dict[str, Any]:
    record, key = await made
    return {**msgspec.structs.asdict(record), "key": key}


async def _listed(keys: StoredKeys) -> Any:
    return msgspec.to_builtins(await keys.list())


def _tell(made: dict[str, Any]) -> None:
    click.echo(made["key"])
    click.echo(f"{made['id']}, {made['role']} of {made['owner']}. It is shown this once; keep it.", err=True)


def _day(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "never"
