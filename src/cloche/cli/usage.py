"""`cloche usage`: prints the usage of owners and keys, from all running servers."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from cloche.cli import load_command_config
from cloche.cli.control import control_sockets, no_server_error, open_client, request_json
from cloche.cli.names import parse_owner_option, unknown_owner_error
from cloche.cli.ps import print_table, printable_text
from cloche.engine.quotas.quotas import OwnerUsage
from cloche.model import GIB, KIB, MIB

_COLUMNS = ("OWNER", "SANDBOXES", "MEMORY", "EXECUTIONS/MIN", "IN ALL", "CPU S/HOUR", "IN ALL", "STORED")
_SUMMED_FIELDS = ("sandboxes", "memory_bytes", "executions_last_minute")  # counted by each server for itself
_SHARED_FIELDS = (
    "executions",
    "cpu_seconds_last_hour",
    "cpu_seconds",
)  # counted by each server for all; the last report is the most complete


@click.command("usage")
@click.argument("owner", required=False, callback=parse_owner_option)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(owner: str | None, as_json: bool) -> None:
    """Print the usage of owners and keys on the running server, each with its quota."""
    config = load_command_config()
    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    known: dict[str, OwnerUsage] = {}
    for socket in found:
        with open_client(socket) as client:
            for each in msgspec.convert(request_json(client, "GET", "/admin/usage"), list[OwnerUsage]):
                known[each.owner] = merge_usage(known[each.owner], each) if each.owner in known else each
    shown = [each for name, each in sorted(known.items()) if owner in (None, name)]
    if owner is not None and not shown:
        raise unknown_owner_error(owner)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(shown)))
    else:
        print_table([_COLUMNS, *(row for each in shown for row in _usage_rows(each))])


def merge_usage(one: OwnerUsage, other: OwnerUsage) -> OwnerUsage:
    """Merges the reports of two servers with one data directory.

    Stored bytes and past use are complete in both.
    """
    keys = {each.key_id: each for each in other.keys}
    summed = [_add_usage(each, keys.pop(each.key_id)) if each.key_id in keys else each for each in one.keys]
    both: OwnerUsage = msgspec.structs.replace(_add_usage(one, other), keys=[*summed, *keys.values()])
    return both


def _add_usage(one: Any, other: Any) -> Any:
    summed = {name: getattr(one, name) + getattr(other, name) for name in _SUMMED_FIELDS}
    kept = {name: max(getattr(one, name), getattr(other, name)) for name in _SHARED_FIELDS}
    return msgspec.structs.replace(one, **summed, **kept)


def _usage_rows(usage: OwnerUsage) -> list[tuple[str, ...]]:
    stored = _format_share(_format_size(usage.stored_bytes), usage.quota.stored_bytes, _format_size)
    own = (printable_text(usage.owner), *_usage_cells(usage), stored)
    return [own, *((f"  {printable_text(each.name or each.key_id)}", *_usage_cells(each), "") for each in usage.keys)]


def _usage_cells(used: Any) -> tuple[str, ...]:
    quota = used.quota
    return (
        _format_share(str(used.sandboxes), quota.sandboxes, str),
        _format_share(_format_size(used.memory_bytes), quota.memory_bytes, _format_size),
        _format_share(str(used.executions_last_minute), quota.executions_per_minute, str),
        str(used.executions),
        _format_share(f"{used.cpu_seconds_last_hour:.1f}", quota.cpu_seconds_per_hour, "{:g}".format),
        f"{used.cpu_seconds:.1f}",
    )


def _format_share(used: str, most: Any, say: Any) -> str:
    return used if most is None else f"{used} of {say(most)}"


def _format_size(count: int) -> str:
    for unit, size in (("G", GIB), ("M", MIB), ("K", KIB)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
