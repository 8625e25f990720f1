"""`cloche key`: manages API keys, over the control socket of a running server, else in the store itself."""

from __future__ import annotations

import asyncio
import datetime
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click
import msgspec

from cloche.cli import EXIT_CLOCHE_FAILED, load_command_config
from cloche.cli.control import COPY_SECONDS, connected_client, control_sockets, open_client, request_json
from cloche.cli.names import parse_key_id_option, parse_owner_option
from cloche.config import Config
from cloche.store import audit
from cloche.store.database import Database
from cloche.store.keys import MAX_YEARS, KeyRecord, StoredKeys

# Future times in command-line options: after a duration, or on a day.

_EXPIRY_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}


def parse_expiry_option(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """An option's callback: seconds since 1970 of `12h` or `30d` from now on, or of the begin of `2027-01-01`."""
    at = None if value is None else parse_expiry(value, time.time())
    if value is not None and at is None:
        raise click.BadParameter(
            f"{value!r} is neither a while, such as 12h or 30d, nor a day to come like 2027-01-01, {MAX_YEARS} years "
            "from now at most"
        )
    return at


def parse_expiry(text: str, now: float) -> float | None:
    """Parses a future time. None if the text is not one, is past, or is too far away."""
    match = re.fullmatch(r"(\d{1,6})([mhdwy])", text)
    if match:
        at = now + int(match[1]) * _EXPIRY_UNITS[match[2]]
    else:
        try:
            at = datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            return None
    return at if now < at <= now + MAX_YEARS * _EXPIRY_UNITS["y"] else None


T = TypeVar("T")


@click.group("key")
def command() -> None:
    """Add, list, rotate and revoke API keys."""


@command.command("add")
@click.option(
    "--owner",
    default="local",
    callback=parse_owner_option,
    help="Owner of sandboxes created with it; by default local.",
)
@click.option("--role", type=click.Choice(["user", "admin"]), default="user", help="By default user.")
@click.option("--name", default="", help="A description, in your own words.")
@click.option(
    "--expires",
    metavar="WHEN",
    callback=parse_expiry_option,
    help="When it stops: after 12h, 30d, or on 2027-01-01; by default never.",
)
def add_command(owner: str, role: str, name: str, expires: float | None) -> None:
    """Create a key and print it, this once."""
    asked = {"owner": owner, "role": role, "name": name, "expires_at": expires}
    _print_new_key(
        _request_or_use_store(
            "POST", "/admin/keys", asked, lambda keys: _describe_new_key(keys.add(owner, role, name, expires))
        )
    )


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List all keys, also expired and revoked ones; never the keys themselves."""
    records = msgspec.convert(_request_or_use_store("GET", "/admin/keys", None, _list_keys), list[KeyRecord])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(records)))
        return
    if not records:
        click.echo("no keys yet: `cloche serve` makes a first one, `cloche key add` others", err=True)
    for each in records:
        made = f"{each.id}  {each.role:<5}  {each.owner:<16}  made {_format_day(each.created_at)}"
        click.echo(f"{made}  {_format_key_state(each)}  {each.name}")


@command.command("rotate")
@click.argument("id", callback=parse_key_id_option)
@click.option(
    "--expires",
    metavar="WHEN",
    callback=parse_expiry_option,
    help="When the new one stops; by default when the old one would have.",
)
def rotate_command(id: str, expires: float | None) -> None:
    """Replace a key by a new one; the old one stops working, and its owner keeps everything."""
    path, asked = f"/admin/keys/{quote(id, safe='')}/rotate", {"expires_at": expires}
    _print_new_key(_request_or_use_store("POST", path, asked, lambda keys: _describe_new_key(keys.rotate(id, expires))))


@command.command("revoke")
@click.argument("id", callback=parse_key_id_option)
@click.option("--kill", is_flag=True, help="Also end the sandboxes that it created, running and paused.")
@click.pass_context
def revoke_command(ctx: click.Context, id: str, kill: bool) -> None:
    """Revoke a key, at once.

    Its sandboxes continue, and a client with a sandbox's own token (as E2B's SDKs have) can still use them: --kill ends
    them, also if the key is already revoked.
    """
    path = f"/admin/keys/{quote(id, safe='')}"
    if not kill:
        _request_or_use_store("DELETE", path, None, lambda keys: keys.revoke(id))
        click.echo(f"revoked {id}", err=True)
        return
    served = control_sockets(load_command_config())
    killed, left = (
        _revoke_and_kill(served, path) if served else (0, asyncio.run(_with_key_store(partial(_revoke_in_store, id))))
    )
    click.echo(f"revoked {id}; {killed} sandboxes killed", err=True)
    if left:
        click.echo(f"cloche: {left} of its sandboxes are paused: do this again when a server runs", err=True)
        ctx.exit(EXIT_CLOCHE_FAILED)


def _revoke_and_kill(served: list[Path], path: str) -> tuple[int, int]:
    """Revokes the key at every server, since each has sandboxes of its own. Returns (killed, left)."""
    killed = 0
    for socket in served:
        with open_client(socket, COPY_SECONDS) as client:
            killed += request_json(client, "DELETE", f"{path}?kill=true")["sandboxes_killed"]
    return killed, 0


async def _revoke_in_store(id: str, keys: StoredKeys) -> int:
    """Revokes the key. Returns how many of its sandboxes are left."""
    await keys.revoke(id, again=True)
    return await keys.paused(id)


def _request_or_use_store(method: str, path: str, body: Any, directly: Callable[[StoredKeys], Awaitable[Any]]) -> Any:
    with connected_client(load_command_config()) as client:
        if client is not None:
            return request_json(client, method, path, body)
    return asyncio.run(_with_key_store(directly))


async def _with_key_store(work: Callable[[StoredKeys], Awaitable[T]]) -> T:
    config = load_command_config()
    async with StoredKeys(Database(Path(config.data_dir) / "store.sqlite3")) as keys:
        keys.on_event = partial(write_audit_line, config)
        return await work(keys)


def write_audit_line(config: Config, what: str, owner: str, id: str, about: str = "") -> None:
    """Writes an audit line as a server would. A failure to write it is only a warning."""
    at = audit.format_time(time.time())
    line = audit.AuditLine(at=at, what=what, owner=owner, by="local", key="local", id=id, about=about)
    try:
        if config.audit.enabled:
            audit.append_once(Path(config.data_dir, "audit"), config.audit.max_bytes, [line])
    except OSError as error:
        click.echo(f"cloche: warning: the audit log cannot be written: {error}", err=True)


async def _describe_new_key(made: Awaitable[tuple[KeyRecord, str]]) -> dict[str, Any]:
    record, key = await made
    return {**msgspec.structs.asdict(record), "key": key}


async def _list_keys(keys: StoredKeys) -> Any:
    return msgspec.to_builtins(await keys.list())


def _print_new_key(made: dict[str, Any]) -> None:
    click.echo(made["key"])
    until = f", until {_format_day(made['expires_at'])}" if made["expires_at"] else ""
    click.echo(f"{made['id']}, {made['role']} of {made['owner']}{until}. It is shown this once; keep it.", err=True)


def _format_key_state(key: KeyRecord) -> str:
    if key.revoked_at:
        return f"revoked {_format_day(key.revoked_at)}"
    until = f"{'expired' if key.expired else 'expires'} {_format_day(key.expires_at)}  " if key.expires_at else ""
    return f"{until}used {_format_day(key.last_used_at)}"


def _format_day(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "never"
