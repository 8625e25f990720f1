"""`cloche usage`: how much owners and keys use, over the control sockets of the servers that run."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import ask, client_of, no_server, sockets
from cloche.cli.names import owner_name, unknown
from cloche.cli.ps import printable, table
from cloche.engine.quotas.usage import OwnerUsage
from cloche.model import GIB, KIB, MIB

_HEAD = ("OWNER", "SANDBOXES", "MEMORY", "EXECUTIONS/MIN", "IN ALL", "CPU S/HOUR", "IN ALL", "STORED")
_NOW = ("sandboxes", "memory_bytes", "executions_last_minute")  # what each server has its own
_KEPT = ("executions", "cpu_seconds_last_hour", "cpu_seconds")  # what each knows of all; who was asked last knows most


@click.command("usage")
@click.argument("owner", required=False, callback=owner_name)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(owner: str | None, as_json: bool) -> None:
    """Say how much owners and keys use of the running server, each with what they may."""
    config = configuration()
    found = sockets(config)
    if not found:
        raise no_server(config)
    known: dict[str, OwnerUsage] = {}
    for socket in found:
        with client_of(socket) as client:
            for each in msgspec.convert(ask(client, "GET", "/admin/usage"), list[OwnerUsage]):
                known[each.owner] = together(known[each.owner], each) if each.owner in known else each
    shown = [each for name, each in sorted(known.items()) if owner in (None, name)]
    if owner is not None and not shown:
        raise unknown(owner)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(shown)))
    else:
        table([_HEAD, *(row for each in shown for row in _rows(each))])


def together(one: OwnerUsage, other: OwnerUsage) -> OwnerUsage:
    """What two servers of one data directory tell of an owner. What is stored, and was used before, both know whole."""
    keys = {each.key_id: each for each in other.keys}
    summed = [_sum(each, keys.pop(each.key_id)) if each.key_id in keys else each for each in one.keys]
    both: OwnerUsage = msgspec.structs.replace(_sum(one, other), keys=[*summed, *keys.values()])
    return both


def _sum(one: Any, other: Any) -> Any:
    summed = {name: getattr(one, name) + getattr(other, name) for name in _NOW}
    kept = {name: max(getattr(one, name), getattr(other, name)) for name in _KEPT}
    return msgspec.structs.replace(one, **summed, **kept)


def _rows(usage: OwnerUsage) -> list[tuple[str, ...]]:
    stored = _of(_size(usage.stored_bytes), usage.quota.stored_bytes, _size)
    own = (printable(usage.owner), *_amounts(usage), stored)
    return [own, *((f"  {printable(each.name or each.key_id)}", *_amounts(each), "") for each in usage.keys)]


def _amounts(used: Any) -> tuple[str, ...]:
    quota = used.quota
    return (
        _of(str(used.sandboxes), quota.sandboxes, str),
        _of(_size(used.memory_bytes), quota.memory_bytes, _size),
        _of(str(used.executions_last_minute), quota.executions_per_minute, str),
        str(used.executions),
        _of(f"{used.cpu_seconds_last_hour:.1f}", quota.cpu_seconds_per_hour, "{:g}".format),
        f"{used.cpu_seconds:.1f}",
    )


def _of(used: str, most: Any, say: Any) -> str:
    return used if most is None else f"{used} of {say(most)}"


def _size(count: int) -> str:
    for unit, size in (("G", GIB), ("M", MIB), ("K", KIB)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
