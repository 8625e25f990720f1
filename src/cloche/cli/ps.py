"""`cloche ps`: the sandboxes of the servers that run."""

from __future__ import annotations

import time

import click
import msgspec

from cloche.cli import configuration
from cloche.cli.control import ask, client_of, no_server, sockets
from cloche.model import SandboxInfo

_HEAD = ("ID", "OWNER", "TEMPLATE", "AGE", "ENDS IN", "METADATA")


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the sandboxes of the running server, of all owners."""
    config = configuration()
    found = sockets(config)
    if not found:
        raise no_server(config)
    infos: list[SandboxInfo] = []
    for socket in found:
        with client_of(socket) as client:
            infos += msgspec.convert(ask(client, "GET", "/api/v1/sandboxes?all=true"), list[SandboxInfo])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(infos)))
    else:
        _table([_HEAD, *(_row(each, time.time()) for each in infos)])


def _row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    left = "never" if info.deadline_at is None else _duration(info.deadline_at - now)
    metadata = " ".join(f"{name}={value}" for name, value in info.metadata.items())
    return info.id, info.owner, info.template, _duration(now - info.created_at), left, printable(metadata)


def _table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    for row in rows:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _duration(seconds: float) -> str:
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
