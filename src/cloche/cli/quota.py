"""`cloche quota`: manages quotas, over a server's control socket, else in the store itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click
import msgspec

from cloche.cli import load_command_config
from cloche.cli.control import connected_client, request_json
from cloche.cli.key import write_audit_line
from cloche.cli.names import parse_key_id_option, parse_owner_option, unknown_owner_error
from cloche.cli.ps import print_table
from cloche.config import parse_bytes
from cloche.config.sections import QUOTA_NAMES, QuotaOverride
from cloche.engine.quotas.quotas import Quotas
from cloche.store.database import Database
from cloche.store.keys import StoredKeys, check_owner_name
from cloche.store.quotas import QuotaSubject, StoredQuotas

UNLIMITED, DEFAULT = "unlimited", "default"


def parse_amount_option(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
    """An option's callback: a number, `unlimited`, or `default`; of bytes also 512MiB or 2GiB."""
    if value in (None, UNLIMITED, DEFAULT):
        return value
    name = str(param.name)
    found = parse_bytes(str(value)) if name.endswith("_bytes") else _parse_number(str(value))
    if found is None:
        raise click.BadParameter(f"{value!r} is neither a number{_number_hint(name)}, nor {UNLIMITED}, nor {DEFAULT}")
    try:
        msgspec.convert({name: found}, QuotaOverride)
    except msgspec.ValidationError as error:
        raise click.BadParameter(f"{value!r}: {str(error).partition(' - at ')[0]}") from None
    return found


def _number_hint(name: str) -> str:
    """An example of a valid number for that quota."""
    if name.endswith("_bytes"):
        return " of bytes, such as 512MiB or 5GiB"
    return " of seconds, such as 3600" if "seconds" in name else ""


class QuotaTarget(NamedTuple):
    """The owner or the key of a quota."""

    owner: str | None
    key: str | None

    @property
    def path(self) -> str:
        if self.key is not None:
            return f"/admin/keys/{quote(self.key, safe='')}/quota"
        return f"/admin/quotas/{quote(self.owner or '', safe='')}"


@click.group("quota")
def command() -> None:
    """Show, set and reset the quotas of owners and keys."""


@command.command("show")
@click.argument("owner", required=False, callback=parse_owner_option)
@click.option("--key", metavar="ID", callback=parse_key_id_option, help="The quotas of that key.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(owner: str | None, key: str | None, as_json: bool) -> None:
    """Show the quotas of an owner or a key; without one, the defaults and all exceptions."""
    if owner is None and key is None:
        found = _request_or_use_store("GET", "/admin/quotas", None, _list_quotas)
        rows = [
            _quota_row("every owner", found["defaults"]["owner"]),
            _quota_row("every key", found["defaults"]["key"]),
        ]
        rows += [_quota_row(_subject_name(each), each["quota"]) for each in found["own"]]
    else:
        found = _fetch_quota(_parse_subject(owner, key))
        if owner is not None and not found["own"] and owner not in _fetch_owners():
            raise unknown_owner_error(owner)
        rows = [_quota_row(_subject_name(found), found["quota"])]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        print_table([("", *(name.upper().replace("_", " ") for name in QUOTA_NAMES)), *rows])


@command.command("set")
@click.argument("owner", required=False, callback=parse_owner_option)
@click.option("--key", metavar="ID", callback=parse_key_id_option, help="For that key.")
@click.option("--sandboxes", metavar="N", callback=parse_amount_option, help="At one time.")
@click.option(
    "--executions-per-minute", metavar="N", callback=parse_amount_option, help="Of code, and starts of commands."
)
@click.option("--cpu-seconds-per-hour", metavar="N", callback=parse_amount_option, help="Of all programs in sandboxes.")
@click.option(
    "--memory-bytes", metavar="N", callback=parse_amount_option, help="Of all sandboxes together, by their limits."
)
@click.option(
    "--stored-bytes",
    metavar="N",
    callback=parse_amount_option,
    help="Snapshots, paused sandboxes, volumes, files. Not for keys.",
)
@click.option("--lifetime-seconds", metavar="N", callback=parse_amount_option, help="Of each sandbox.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def set_command(owner: str | None, key: str | None, as_json: bool, **amounts: object) -> None:
    """Set quotas of an owner or a key: numbers, `unlimited`, or `default`. Others stay unchanged."""
    given = {name: amount for name, amount in amounts.items() if amount is not None}
    if not given:
        raise click.UsageError("name a quota to set, for example --sandboxes 20")
    subject = _parse_subject(owner, key)
    own = {**_fetch_quota(subject)["own"], **given}
    body = {name: None if each == UNLIMITED else each for name, each in own.items() if each != DEFAULT}
    is_new = owner is not None and owner not in _fetch_owners()
    _request_or_use_store(
        "PUT", subject.path, body, lambda desk: desk.set(subject, msgspec.convert(body, QuotaOverride))
    )
    _print_quota(subject, as_json)
    if is_new:
        click.echo(f"cloche: {owner!r} has no key yet: `cloche key add --owner {owner}` makes one", err=True)


@command.command("reset")
@click.argument("owner", required=False, callback=parse_owner_option)
@click.option("--key", metavar="ID", callback=parse_key_id_option, help="For that key.")
def reset_command(owner: str | None, key: str | None) -> None:
    """Reset the quotas of an owner or a key to the defaults."""
    subject = _parse_subject(owner, key)
    _request_or_use_store("DELETE", subject.path, None, lambda desk: desk.set(subject, QuotaOverride()))
    _print_quota(subject, as_json=False)


class _QuotaStore:
    """Reads and sets quotas in the store, as a server would."""

    def __init__(self, keys: StoredKeys, quotas: Quotas, stored: StoredQuotas):
        self.keys = keys
        self.quotas = quotas
        self._stored = stored

    async def tenant(self, subject: QuotaTarget, *, set: bool = False) -> QuotaSubject:
        """The tenant of a subject. The quota of a revoked key can be read and removed, but not set."""
        if subject.key is not None:
            record = await self.keys.get(subject.key, revoked=not set)
            return QuotaSubject(record.owner, record.id)
        check_owner_name(subject.owner or "")
        return QuotaSubject(subject.owner or "")

    async def show(self, subject: QuotaTarget) -> dict[str, Any]:
        return self.told(await self.tenant(subject))

    async def set(self, subject: QuotaTarget, override: QuotaOverride) -> None:
        await self.quotas.set(await self.tenant(subject, set=bool(override.given())), override)

    async def owners(self) -> list[str]:
        return sorted(await self._stored.owners())

    def told(self, tenant: QuotaSubject) -> dict[str, Any]:
        own, quota = self.quotas.overrides.get(tenant, QuotaOverride()), self.quotas.quota_of(tenant)
        return {**tenant._asdict(), "own": msgspec.to_builtins(own), "quota": msgspec.to_builtins(quota)}


async def _list_quotas(desk: _QuotaStore) -> dict[str, Any]:
    own = [desk.told(tenant) for tenant in sorted(desk.quotas.overrides)]
    return {"defaults": msgspec.to_builtins(desk.quotas.defaults), "own": own}


def _fetch_quota(subject: QuotaTarget) -> dict[str, Any]:
    found: dict[str, Any] = _request_or_use_store("GET", subject.path, None, lambda desk: desk.show(subject))
    return found


def _fetch_owners() -> list[str]:
    """All owners with a key, a quota, stored data or any use."""
    with connected_client(load_command_config()) as client:
        if client is not None:
            return [each["owner"] for each in request_json(client, "GET", "/admin/usage")]
    found: list[str] = asyncio.run(_with_quota_store(lambda desk: desk.owners()))
    return found


def _request_or_use_store(method: str, path: str, body: Any, directly: Callable[[_QuotaStore], Awaitable[Any]]) -> Any:
    with connected_client(load_command_config()) as client:
        if client is not None:
            return request_json(client, method, path, body)
    return asyncio.run(_with_quota_store(directly))


async def _with_quota_store(work: Callable[[_QuotaStore], Awaitable[Any]]) -> Any:
    config = load_command_config()
    database = Database(Path(config.data_dir) / "store.sqlite3")
    async with StoredKeys(database) as keys:
        stored = StoredQuotas(database)
        quotas = Quotas(config.quotas, stored)
        quotas.on_change = lambda tenant, quota: write_audit_line(config, "quota.set", *tenant, about=quota)
        await quotas.refresh()
        return await work(_QuotaStore(keys, quotas, stored))


def _parse_subject(owner: str | None, key: str | None) -> QuotaTarget:
    if (owner is None) == (key is None):
        raise click.UsageError("name an owner, or a key with --key ID")
    return QuotaTarget(owner, key)


def _print_quota(subject: QuotaTarget, as_json: bool) -> None:
    found = _fetch_quota(subject)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    print_table(
        [
            ("", *(name.upper().replace("_", " ") for name in QUOTA_NAMES)),
            _quota_row(_subject_name(found), found["quota"]),
        ]
    )


def _subject_name(found: dict[str, Any]) -> str:
    return f"{found['owner']} {found['key_id']}" if found.get("key_id") else str(found["owner"])


def _quota_row(subject: str, quota: dict[str, Any]) -> tuple[str, ...]:
    return subject, *("-" if quota.get(name) is None else str(quota[name]) for name in QUOTA_NAMES)


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number
