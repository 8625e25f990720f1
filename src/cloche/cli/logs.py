"""`cloche logs`: what the server says about itself. Never a program's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import click
import httpx2
import msgspec

from cloche import errors
from cloche.cli import configuration
from cloche.cli.control import ask, client_of, connected, error_of, no_server, sockets
from cloche.cli.ps import printable
from cloche.config import Config
from cloche.network_policy import NetworkEntry
from cloche.protocol import responses
from cloche.telemetry import OF_NETWORKS

# `cloche logs --network`: what sandboxes tried to reach, and what became of it.

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
        yield network_line(entry)


def of_server(client: httpx2.Client) -> Iterator[str]:
    """What the server's own log has of all sandboxes."""
    return of_events(_events(client))


def of_events(entries: Iterable[responses.Logged]) -> Iterator[str]:
    for each in entries:
        sandbox = str(each.fields.get("sandbox", ""))
        if each.event == LEFT_OUT:
            yield sum_of(each, sandbox)
        elif each.event in OF_NETWORKS:
            yield network_line(entry_of(each), sandbox)


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


def network_line(entry: NetworkEntry, sandbox: str = "") -> str:
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


# `cloche logs --request ID`: what a request for a model's answer did, as a tree.

_NAMES = {"model_call": "model call", "container": "container", "execution": "execution"}


def show_request(config: Config, id: str, *, as_json: bool) -> None:
    """Raises Unavailable where no server runs, and NotFound."""
    found = sockets(config)
    if not found:
        raise no_server(config)
    with client_of(found[0]) as client:  # servers of one data directory share their records
        told = ask(client, "GET", f"/admin/requests/{quote(id, safe='')}")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told)))
        return
    try:
        for tree in told["requests"]:
            for line in lines_of(tree):
                click.echo(printable(line.expandtabs()))
    except (KeyError, TypeError, ValueError) as error:
        raise errors.ProtocolViolation(f"the server tells of requests in words of another version: {error}") from None


def lines_of(tree: dict[str, Any]) -> Iterator[str]:
    """A request and what it did, in lines with box drawing."""
    when = datetime.fromtimestamp(tree["at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = [when, tree["owner"], tree.get("model", ""), tree["outcome"], _seconds(tree["seconds"]), _tokens(tree)]
    yield f"request {tree['id']}  " + "  ".join(filter(None, about))
    yield from _captured(tree, "   " if not tree["steps"] else "│  ")
    for number, step in enumerate(tree["steps"], 1):
        last = number == len(tree["steps"])
        yield f"{'└─' if last else '├─'} {_line(step)}"
        yield from _captured(step, "   " if last else "│  ")


def _line(step: dict[str, Any]) -> str:
    name = _NAMES.get(step["kind"], step["kind"])
    if "leg" in step:
        name += f" {step['leg']}"
    about = [
        f"+{_seconds(step['offset_seconds'])}",
        f"{name:<12}",
        step["outcome"],
        _seconds(step["seconds"]),
        step.get("model", ""),
        f"first after {_seconds(step['first_seconds'])}" if "first_seconds" in step else "",
        _tokens(step),
        step.get("container", ""),
        step.get("how", ""),
        _usage(step),
        _refusal(step),
    ]
    return "  ".join(filter(None, about))


def _tokens(fields: dict[str, Any]) -> str:
    if "input_tokens" not in fields:
        return ""
    cached = f" ({fields['cached_tokens']} cached)" if fields.get("cached_tokens") else ""
    return f"{fields['input_tokens']}{cached} + {fields.get('output_tokens', 0)} tokens"


def _usage(fields: dict[str, Any]) -> str:
    if "cpu_seconds" not in fields:
        return ""
    return f"cpu {_seconds(fields['cpu_seconds'])}, memory {fields.get('memory_peak_bytes', 0) / (1 << 20):.0f} MiB"


def _refusal(fields: dict[str, Any]) -> str:
    if fields.get("upstream_status", 200) == 200 and "error" not in fields:
        return ""
    return " ".join(str(fields[name]) for name in ("upstream_status", "error") if name in fields)


def _captured(fields: dict[str, Any], margin: str) -> Iterator[str]:
    for name, text in fields.get("captured", {}).items():
        yield f"{margin}{name}:"
        for line in str(text).splitlines():
            yield f"{margin}    {line}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


@click.command("logs")
@click.argument("id", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on, until Ctrl-C.")
@click.option("--network", is_flag=True, help="Only what sandboxes tried to reach, and what became of it.")
@click.option("--request", metavar="ID", help="Print what that request for a model's answer did, as a tree.")
@click.option("--json", "as_json", is_flag=True, help="With --request: print JSON.")
def command(id: str | None, follow: bool, network: bool, request: str | None, as_json: bool) -> None:
    """Print the running server's own events, those of sandbox ID only if it is given: why it ended, what failed."""
    config = configuration()
    if (id or follow or network) if request is not None else as_json:
        raise click.UsageError("--request goes with --json only, and --json with --request")
    if request is not None:
        show_request(config, request, as_json=as_json)
        return
    query = "?" + urlencode({"sandbox": id}) if id else ""
    with connected(config) as client:
        if client is None:
            raise no_server(config)
        if follow:
            entries = _followed(client, f"/api/v1/logs/follow{query}")
            _print(of_events(entries) if network else map(log_line, entries))
        elif network:
            _print(of_sandbox(client, id) if id else of_server(client))
        else:
            found = ask(client, "GET", f"/api/v1/logs{query}")
            _print(log_line(responses.decode(responses.encode(each), responses.Logged)) for each in found)


def _print(lines: Iterable[str]) -> None:
    """Ctrl-C ends what goes on and on."""
    try:
        for line in lines:
            click.echo(line)
    except KeyboardInterrupt:
        pass


def _followed(client: httpx2.Client, path: str) -> Iterator[responses.Logged]:
    """Raises Unavailable when the server ends."""
    try:
        with client.stream("GET", path, timeout=httpx2.Timeout(None)) as response:
            if not response.is_success:
                response.read()
                raise error_of(response)
            events = responses.EventsIn()
            for chunk in response.iter_raw():
                yield from (event for event in events.feed(chunk) if isinstance(event, responses.Logged))
    except httpx2.HTTPError:
        pass
    raise errors.Unavailable("the server has ended")


def log_line(entry: responses.Logged) -> str:
    """As a log's line: when, how grave, what, and its fields."""
    when = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = " ".join(f"{name}={value}" for name, value in entry.fields.items())
    return printable(f"{when} {entry.level:<7} {entry.event} {fields}".rstrip())
