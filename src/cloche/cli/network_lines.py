"""`cloche logs --network`: what sandboxes tried to reach, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from urllib.parse import quote

import httpx2

from cloche import errors
from cloche.cli.control import ask
from cloche.cli.ps import printable
from cloche.network_policy import NetworkEntry
from cloche.protocol import responses
from cloche.telemetry import OF_NETWORKS

LEFT_OUT = "network.left_out"
EVENTS = "network."  # the server's own log has them under this and their verdict


def of_sandbox(client: httpx2.Client, id: str) -> Iterator[str]:
    """The whole log of one that runs; of one that has ended, what the server's own log still has."""
    try:
        answer = ask(client, "GET", f"/api/v1/sandboxes/{quote(id, safe='')}/network/log")
    except errors.Gone:
        yield from of_events(_events(client, f"?sandbox={quote(id, safe='')}"))
        return
    logged: responses.NetworkLogged = responses.decode(responses.encode(answer), responses.NetworkLogged)
    if logged.dropped:
        yield f"({logged.dropped} older entries made room)"
    for entry in logged.entries:
        yield line_of(entry)


def of_server(client: httpx2.Client) -> Iterator[str]:
    """What the server's own log has of all sandboxes."""
    return of_events(_events(client))


def of_events(entries: Iterable[responses.Logged]) -> Iterator[str]:
    for each in entries:
        sandbox = str(each.fields.get("sandbox", ""))
        if each.event == LEFT_OUT:
            yield sum_of(each, sandbox)
        elif each.event in OF_NETWORKS:
            yield line_of(entry_of(each), sandbox)


def sum_of(logged: responses.Logged, sandbox: str) -> str:
    """A line for many: they came faster than the server's log has lines for, and went where another line says."""
    fields = logged.fields
    there = f"{fields.get('host') or '-'}" + (f":{fields['port']}" if fields.get("port") else "")
    moved = f"sent {fields.get('sent_bytes', 0)} received {fields.get('received_bytes', 0)}"
    many = f"{fields.get('lines', 0)} more connections that ended until then"
    verdict = f"{fields.get('verdict', '-')!s:<7}"
    words = (_when(logged.at), sandbox, verdict, f"{'':<7}", there, moved, many, str(fields.get("package", "")))
    return printable("  ".join(each for each in words if each))


def entry_of(logged: responses.Logged) -> NetworkEntry:
    """The entry that a line of the server's log was written for. What is left out there is nothing."""
    fields = logged.fields
    return NetworkEntry(
        at=logged.at,
        protocol=fields.get("protocol", "other"),
        host=str(fields.get("host", "")),
        port=int(fields.get("port", 0)),
        verdict=logged.event.removeprefix(EVENTS),  # type: ignore[arg-type]  # one of its words
        reason=str(fields.get("reason", "")),
        sent_bytes=int(fields.get("sent_bytes", 0)),
        received_bytes=int(fields.get("received_bytes", 0)),
    )


def line_of(entry: NetworkEntry, sandbox: str = "") -> str:
    """When, which sandbox where there are several, what became of it, where to, and how much or why."""
    when = _when(entry.at)
    there = f"{entry.host}:{entry.port}" if entry.port else entry.host or "-"
    moved = f"sent {entry.sent_bytes} received {entry.received_bytes}" if entry.verdict in ("allowed", "open") else ""
    words = (when, sandbox, f"{entry.verdict:<7}", f"{entry.protocol:<7}", there, moved, entry.reason)
    return printable("  ".join(each for each in words if each))


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _events(client: httpx2.Client, query: str = "") -> list[responses.Logged]:
    return [
        responses.decode(responses.encode(each), responses.Logged)
        for each in ask(client, "GET", f"/api/v1/logs{query}")
    ]
