"""`cloche ps`: the sandboxes of the servers that run."""

from __future__ import annotations

import time

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import ask, client_of, no_server, sockets
from cloche.engine.quotas.occupancy import CapacityInfo, Occupancy
from cloche.model import SandboxInfo

_HEAD = ("ID", "OWNER", "KEY", "TEMPLATE", "STATE", "AGE", "ENDS IN", "METADATA")


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the sandboxes of the running server, also paused ones, of all owners."""
    config = configuration()
    found = sockets(config)
    if not found:
        raise no_server(config)
    known: dict[str, SandboxInfo] = {}
    capacities: list[CapacityInfo] = []
    for socket in found:
        with client_of(socket) as client:
            capacities.append(msgspec.convert(ask(client, "GET", "/admin/capacity"), CapacityInfo))
            for each in msgspec.convert(ask(client, "GET", "/api/v1/sandboxes?all=true"), list[SandboxInfo]):
                if each.state == "running" or each.id not in known:  # one on a disk is known to all servers there
                    known[each.id] = each
    infos = list(known.values())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(infos)))
    else:
        table([_HEAD, *(_row(each, time.time()) for each in infos)])
        for capacity in capacities:
            click.echo(summary(capacity))


def summary(info: CapacityInfo) -> str:
    """A server's capacity, in a line."""
    waiting = info.sandboxes.waiting + info.executions.waiting
    pools = f"{info.pool.ready}/{info.pool.wanted} in pools"
    short = "" if info.memory.ample else ", memory is short"
    return f"{_used(info.sandboxes)} sandboxes, {_used(info.executions)} executions, {waiting} waiting, {pools}{short}"


def _used(gate: Occupancy) -> str:
    return f"{gate.in_use}/{gate.capacity}"


def _row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    metadata = " ".join(f"{name}={value}" for name, value in info.metadata.items())
    age = duration(now - info.created_at)
    return (
        info.id,
        info.owner,
        info.key_id or "-",
        info.template,
        _state(info),
        age,
        _left(info, now),
        printable(metadata),
    )


def _state(info: SandboxInfo) -> str:
    return "paused (files)" if info.state == "paused" and not info.pause_memory else info.state


def _left(info: SandboxInfo, now: float) -> str:
    if info.state == "paused":
        return "-"  # its deadline stands still
    return "never" if info.deadline_at is None else duration(info.deadline_at - now)


def table(rows: list[tuple[str, ...]]) -> None:
    """The first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def duration(seconds: float) -> str:
    """The two largest units of it: 5s, 3m 20s, 2h 1m, 1d 4h."""
    parts: list[str] = []
    rest = max(int(seconds), 0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def printable(text: str) -> str:
    """What a user of the server wrote cannot steer the operator's terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
