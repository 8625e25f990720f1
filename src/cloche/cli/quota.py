"""`cloche quota`: how much owners and keys may use. Over a server's control socket, else in the store itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import ask, connected
from cloche.cli.key import write_down
from cloche.cli.names import key_id, owner_name, unknown
from cloche.cli.ps import table
from cloche.config import bytes_of
from cloche.config.sections import NAMES, Override
from cloche.engine.quotas.quotas import Quotas
from cloche.store.database import Database
from cloche.store.keys import StoredKeys, check_owner
from cloche.store.quotas import StoredQuotas, Tenant

UNLIMITED, DEFAULT = "unlimited", "default"


def amount(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
    """An option's callback: a number, `unlimited`, or `default`; of bytes also 512MiB or 2GiB."""
    if value in (None, UNLIMITED, DEFAULT):
        return value
    name = str(param.name)
    found = bytes_of(str(value)) if name.endswith("_bytes") else _number(str(value))
    if found is None:
        raise click.BadParameter(f"{value!r} is neither a number{_like(name)}, nor {UNLIMITED}, nor {DEFAULT}")
    try:
        msgspec.convert({name: found}, Override)
    except msgspec.ValidationError as error:
        raise click.BadParameter(f"{value!r}: {str(error).partition(' - at ')[0]}") from None
    return found


def _like(name: str) -> str:
    """What a number can be like."""
    if name.endswith("_bytes"):
        return " of bytes, such as 512MiB or 5GiB"
    return " of seconds, such as 3600" if "seconds" in name else ""


class Subject(NamedTuple):
    """Whose quotas are meant."""

    owner: str | None
    key: str | None

    @property
    def path(self) -> str:
        if self.key is not None:
            return f"/admin/keys/{quote(self.key, safe='')}/quota"
        return f"/admin/quotas/{quote(self.owner or '', safe='')}"


@click.group("quota")
def command() -> None:
    """Show, set and reset how much owners and keys may use."""


@command.command("show")
@click.argument("owner", required=False, callback=owner_name)
@click.option("--key", metavar="ID", callback=key_id, help="Of that key.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(owner: str | None, key: str | None, as_json: bool) -> None:
    """Show what holds for an owner or a key; without one, the defaults, and for whom something else holds."""
    if owner is None and key is None:
        found = _do("GET", "/admin/quotas", None, _all)
        rows = [_row("every owner", found["defaults"]["owner"]), _row("every key", found["defaults"]["key"])]
        rows += [_row(_whose(each), each["quota"]) for each in found["own"]]
    else:
        found = _show(_subject(owner, key))
        if owner is not None and not found["own"] and owner not in _owners():
            raise unknown(owner)
        rows = [_row(_whose(found), found["quota"])]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        table([("", *(name.upper().replace("_", " ") for name in NAMES)), *rows])


@command.command("set")
@click.argument("owner", required=False, callback=owner_name)
@click.option("--key", metavar="ID", callback=key_id, help="For that key.")
@click.option("--sandboxes", metavar="N", callback=amount, help="At one time.")
@click.option("--executions-per-minute", metavar="N", callback=amount, help="Of code, and starts of commands.")
@click.option("--cpu-seconds-per-hour", metavar="N", callback=amount, help="Of all programs in sandboxes.")
@click.option("--memory-bytes", metavar="N", callback=amount, help="Of all sandboxes together, by their limits.")
@click.option(
    "--stored-bytes", metavar="N", callback=amount, help="Snapshots, paused sandboxes, volumes, files. Not for keys."
)
@click.option("--lifetime-seconds", metavar="N", callback=amount, help="Of each sandbox.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def set_command(owner: str | None, key: str | None, as_json: bool, **amounts: object) -> None:
    """Say how much an owner or a key may use: numbers, `unlimited`, or `default`. What is not given stays."""
    given = {name: amount for name, amount in amounts.items() if amount is not None}
    if not given:
        raise click.UsageError("say what to set, for example --sandboxes 20")
    subject = _subject(owner, key)
    own = {**_show(subject)["own"], **given}
    body = {name: None if each == UNLIMITED else each for name, each in own.items() if each != DEFAULT}
    is_new = owner is not None and owner not in _owners()
    _do("PUT", subject.path, body, lambda desk: desk.set(subject, msgspec.convert(body, Override)))
    _tell(subject, as_json)
    if is_new:
        click.echo(f"cloche: {owner!r} has no key yet: `cloche key add --owner {owner}` makes one", err=True)


@command.command("reset")
@click.argument("owner", required=False, callback=owner_name)
@click.option("--key", metavar="ID", callback=key_id, help="For that key.")
def reset_command(owner: str | None, key: str | None) -> None:
    """Let the defaults hold again for an owner or a key."""
    subject = _subject(owner, key)
    _do("DELETE", subject.path, None, lambda desk: desk.set(subject, Override()))
    _tell(subject, as_json=False)


class _Desk:
    """What a server would do."""

    def __init__(self, keys: StoredKeys, quotas: Quotas, stored: StoredQuotas):
        self.keys = keys
        self.quotas = quotas
        self._stored = stored

    async def tenant(self, subject: Subject, *, set: bool = False) -> Tenant:
        """Of a key that was revoked a quota can be seen and removed, but not set."""
        if subject.key is not None:
            record = await self.keys.get(subject.key, revoked=not set)
            return Tenant(record.owner, record.id)
        check_owner(subject.owner or "")
        return Tenant(subject.owner or "")

    async def show(self, subject: Subject) -> dict[str, Any]:
        return self.told(await self.tenant(subject))

    async def set(self, subject: Subject, override: Override) -> None:
        await self.quotas.set(await self.tenant(subject, set=bool(override.given())), override)

    async def owners(self) -> list[str]:
        return sorted(await self._stored.owners())

    def told(self, tenant: Tenant) -> dict[str, Any]:
        own, quota = self.quotas.overrides.get(tenant, Override()), self.quotas.quota_of(tenant)
        return {**tenant._asdict(), "own": msgspec.to_builtins(own), "quota": msgspec.to_builtins(quota)}


async def _all(desk: _Desk) -> dict[str, Any]:
    own = [desk.told(tenant) for tenant in sorted(desk.quotas.overrides)]
    return {"defaults": msgspec.to_builtins(desk.quotas.defaults), "own": own}


def _show(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = _do("GET", subject.path, None, lambda desk: desk.show(subject))
    return found


def _owners() -> list[str]:
    """All who have a key, a quota, or anything that is kept, or have used anything."""
    with connected(configuration()) as client:
        if client is not None:
            return [each["owner"] for each in ask(client, "GET", "/admin/usage")]
    found: list[str] = asyncio.run(_in_store(lambda desk: desk.owners()))
    return found


def _do(method: str, path: str, body: Any, directly: Callable[[_Desk], Awaitable[Any]]) -> Any:
    with connected(configuration()) as client:
        if client is not None:
            return ask(client, method, path, body)
    return asyncio.run(_in_store(directly))


async def _in_store(work: Callable[[_Desk], Awaitable[Any]]) -> Any:
    config = configuration()
    database = Database(Path(config.data_dir) / "store.sqlite3")
    async with StoredKeys(database) as keys:
        stored = StoredQuotas(database)
        quotas = Quotas(config.quotas, stored)
        quotas.heard = lambda tenant, quota: write_down(config, "quota.set", *tenant, about=quota)
        await quotas.refresh()
        return await work(_Desk(keys, quotas, stored))


def _subject(owner: str | None, key: str | None) -> Subject:
    if (owner is None) == (key is None):
        raise click.UsageError("name an owner, or a key with --key ID")
    return Subject(owner, key)


def _tell(subject: Subject, as_json: bool) -> None:
    found = _show(subject)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    table([("", *(name.upper().replace("_", " ") for name in NAMES)), _row(_whose(found), found["quota"])])


def _whose(found: dict[str, Any]) -> str:
    return f"{found['owner']} {found['key_id']}" if found.get("key_id") else str(found["owner"])


def _row(whose: str, quota: dict[str, Any]) -> tuple[str, ...]:
    return whose, *("-" if quota.get(name) is None else str(quota[name]) for name in NAMES)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number
