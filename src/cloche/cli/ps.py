"""`cloche ps`: lists the sandboxes of the running servers."""

from __future__ import annotations

import time

import click
import msgspec

from cloche.cli import load_command_config
from cloche.cli.control import control_sockets, no_server_error, open_client, request_json
from cloche.engine.quotas.occupancy import CapacityInfo, Occupancy
from cloche.model import SandboxInfo

_COLUMNS = ("ID", "OWNER", "KEY", "TEMPLATE", "STATE", "AGE", "ENDS IN", "METADATA")


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the sandboxes of the running server, also paused ones, of all owners."""
    config = load_command_config()
    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    known: dict[str, SandboxInfo] = {}
    capacities: list[CapacityInfo] = []
    for socket in found:
        with open_client(socket) as client:
            capacities.append(msgspec.convert(request_json(client, "GET", "/admin/capacity"), CapacityInfo))
            for each in msgspec.convert(request_json(client, "GET", "/api/v1/sandboxes?all=true"), list[SandboxInfo]):
                if each.state == "running" or each.id not in known:  # one on a disk is known to all servers there
                    known[each.id] = each
    infos = list(known.values())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(infos)))
    else:
        print_table([_COLUMNS, *(_sandbox_row(each, time.time()) for each in infos)])
        for capacity in capacities:
            click.echo(format_capacity(capacity))


def format_capacity(info: CapacityInfo) -> str:
    """Formats a server's capacity as one line."""
    waiting = info.sandboxes.waiting + info.executions.waiting
    pools = f"{info.pool.ready}/{info.pool.wanted} in pools"
    short = "" if info.memory.ample else ", memory is short"
    sandboxes, executions = _format_occupancy(info.sandboxes), _format_occupancy(info.executions)
    return f"{sandboxes} sandboxes, {executions} executions, {waiting} waiting, {pools}{short}"


def _format_occupancy(gate: Occupancy) -> str:
    return f"{gate.in_use}/{gate.capacity}"


def _sandbox_row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    metadata = " ".join(f"{name}={value}" for name, value in info.metadata.items())
    age = format_duration(now - info.created_at)
    return (
        info.id,
        info.owner,
        info.key_id or "-",
        info.template,
        _format_state(info),
        age,
        _format_time_left(info, now),
        printable_text(metadata),
    )


def _format_state(info: SandboxInfo) -> str:
    return "paused (files)" if info.state == "paused" and not info.pause_memory else info.state


def _format_time_left(info: SandboxInfo, now: float) -> str:
    if info.state == "paused":
        return "-"  # its deadline stands still
    return "never" if info.deadline_at is None else format_duration(info.deadline_at - now)


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows in columns. The first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def format_duration(seconds: float) -> str:
    """The two largest units of it: 5s, 3m 20s, 2h 1m, 1d 4h."""
    parts: list[str] = []
    rest = max(int(seconds), 0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def printable_text(text: str) -> str:
    """Text of the server's users cannot steer the operator's terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
