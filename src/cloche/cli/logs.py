"""`cloche logs`: prints the server's own events. Never a program's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import click
import httpx2
import msgspec

from cloche import errors
from cloche.cli import load_command_config
from cloche.cli.control import (
    connected_client,
    control_sockets,
    no_server_error,
    open_client,
    request_json,
    response_error,
)
from cloche.cli.ps import printable_text
from cloche.config import Config
from cloche.network_policy import NetworkEntry
from cloche.protocol import responses
from cloche.telemetry import NETWORK_EVENTS

# `cloche logs --network`: prints the connections that sandboxes attempted, and their outcomes.

LEFT_OUT_EVENT = "network.left_out"
NETWORK_EVENT_PREFIX = "network."  # the server's own log has them under this and their verdict


def sandbox_network_lines(client: httpx2.Client, id: str) -> Iterator[str]:
    """Lines of the network log of a running sandbox; of an ended one, the rest in the server's own log."""
    try:
        answer = request_json(client, "GET", f"/api/v1/sandboxes/{quote(id, safe='')}/network/log")
    except errors.Gone:
        yield from network_event_lines(_fetch_log_entries(client, f"?sandbox={quote(id, safe='')}"))
        return
    logged: responses.NetworkLogResponse = responses.decode_json(
        responses.encode_json(answer), responses.NetworkLogResponse
    )
    if logged.dropped:
        yield f"({logged.dropped} older entries made room)"
    for entry in logged.entries:
        yield format_network_entry(entry)


def server_network_lines(client: httpx2.Client) -> Iterator[str]:
    """Lines for the network events of all sandboxes in the server's own log."""
    return network_event_lines(_fetch_log_entries(client))


def network_event_lines(entries: Iterable[responses.LogMessage]) -> Iterator[str]:
    for each in entries:
        sandbox = str(each.fields.get("sandbox", ""))
        if each.event == LEFT_OUT_EVENT:
            yield format_left_out(each, sandbox)
        elif each.event in NETWORK_EVENTS:
            yield format_network_entry(to_network_entry(each), sandbox)


def format_left_out(logged: responses.LogMessage, sandbox: str) -> str:
    """One line for many connections to one destination that came faster than the server's log takes lines."""
    fields = logged.fields
    there = f"{fields.get('host') or '-'}" + (f":{fields['port']}" if fields.get("port") else "")
    moved = f"sent {fields.get('sent_bytes', 0)} received {fields.get('received_bytes', 0)}"
    many = f"{fields.get('lines', 0)} more connections that ended until then"
    verdict = f"{fields.get('verdict', '-')!s:<7}"
    words = (_format_time(logged.at), sandbox, verdict, f"{'':<7}", there, moved, many, str(fields.get("package", "")))
    return printable_text("  ".join(each for each in words if each))


def to_network_entry(logged: responses.LogMessage) -> NetworkEntry:
    """The network entry of a line of the server's log. Fields that are absent there are empty."""
    fields = logged.fields
    return NetworkEntry(
        at=logged.at,
        protocol=fields.get("protocol", "other"),
        host=str(fields.get("host", "")),
        port=int(fields.get("port", 0)),
        verdict=logged.event.removeprefix(NETWORK_EVENT_PREFIX),  # type: ignore[arg-type]  # one of its words
        reason=str(fields.get("reason", "")),
        sent_bytes=int(fields.get("sent_bytes", 0)),
        received_bytes=int(fields.get("received_bytes", 0)),
    )


def format_network_entry(entry: NetworkEntry, sandbox: str = "") -> str:
    """Formats an entry: time, sandbox (where there are several), verdict, destination, and bytes or reason."""
    when = _format_time(entry.at)
    there = f"{entry.host}:{entry.port}" if entry.port else entry.host or "-"
    moved = f"sent {entry.sent_bytes} received {entry.received_bytes}" if entry.verdict in ("allowed", "open") else ""
    words = (when, sandbox, f"{entry.verdict:<7}", f"{entry.protocol:<7}", there, moved, entry.reason)
    return printable_text("  ".join(each for each in words if each))


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _fetch_log_entries(client: httpx2.Client, query: str = "") -> list[responses.LogMessage]:
    return [
        responses.decode_json(responses.encode_json(each), responses.LogMessage)
        for each in request_json(client, "GET", f"/api/v1/logs{query}")
    ]


# `cloche logs --request ID`: prints the steps of a request for a model's answer, as a tree.

_STEP_NAMES = {"model_call": "model call", "container": "container", "execution": "execution"}


def show_request(config: Config, id: str, *, as_json: bool) -> None:
    """Raises Unavailable where no server runs, and NotFound."""
    found = control_sockets(config)
    if not found:
        raise no_server_error(config)
    with open_client(found[0]) as client:  # servers of one data directory share their records
        told = request_json(client, "GET", f"/admin/requests/{quote(id, safe='')}")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told)))
        return
    try:
        for tree in told["requests"]:
            for line in request_lines(tree):
                click.echo(printable_text(line.expandtabs()))
    except (KeyError, TypeError, ValueError) as error:
        raise errors.ProtocolViolation(f"the server's record of requests is of another version: {error}") from None


def request_lines(tree: dict[str, Any]) -> Iterator[str]:
    """A request and its steps, in lines with box drawing."""
    when = datetime.fromtimestamp(tree["at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = [
        when,
        tree["owner"],
        tree.get("model", ""),
        tree["outcome"],
        _format_seconds(tree["seconds"]),
        _format_tokens(tree),
    ]
    yield f"request {tree['id']}  " + "  ".join(filter(None, about))
    yield from _captured_lines(tree, "   " if not tree["steps"] else "│  ")
    for number, step in enumerate(tree["steps"], 1):
        last = number == len(tree["steps"])
        yield f"{'└─' if last else '├─'} {_step_line(step)}"
        yield from _captured_lines(step, "   " if last else "│  ")


def _step_line(step: dict[str, Any]) -> str:
    name = _STEP_NAMES.get(step["kind"], step["kind"])
    if "leg" in step:
        name += f" {step['leg']}"
    about = [
        f"+{_format_seconds(step['offset_seconds'])}",
        f"{name:<12}",
        step["outcome"],
        _format_seconds(step["seconds"]),
        step.get("model", ""),
        f"first after {_format_seconds(step['first_seconds'])}" if "first_seconds" in step else "",
        _format_tokens(step),
        step.get("container", ""),
        step.get("how", ""),
        _format_usage(step),
        _format_refusal(step),
    ]
    return "  ".join(filter(None, about))


def _format_tokens(fields: dict[str, Any]) -> str:
    if "input_tokens" not in fields:
        return ""
    cached = f" ({fields['cached_tokens']} cached)" if fields.get("cached_tokens") else ""
    return f"{fields['input_tokens']}{cached} + {fields.get('output_tokens', 0)} tokens"


def _format_usage(fields: dict[str, Any]) -> str:
    if "cpu_seconds" not in fields:
        return ""
    return (
        f"cpu {_format_seconds(fields['cpu_seconds'])}, memory {fields.get('memory_peak_bytes', 0) / (1 << 20):.0f} MiB"
    )


def _format_refusal(fields: dict[str, Any]) -> str:
    if fields.get("upstream_status", 200) == 200 and "error" not in fields:
        return ""
    return " ".join(str(fields[name]) for name in ("upstream_status", "error") if name in fields)


def _captured_lines(fields: dict[str, Any], margin: str) -> Iterator[str]:
    for name, text in fields.get("captured", {}).items():
        yield f"{margin}{name}:"
        for line in str(text).splitlines():
            yield f"{margin}    {line}"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


@click.command("logs")
@click.argument("id", required=False)
@click.option("-f", "--follow", is_flag=True, help="Continue with new events, until Ctrl-C.")
@click.option("--network", is_flag=True, help="Only connection attempts of sandboxes, and their results.")
@click.option("--request", metavar="ID", help="Print the steps of that request for a model's response, as a tree.")
@click.option("--json", "as_json", is_flag=True, help="With --request: print JSON.")
def command(id: str | None, follow: bool, network: bool, request: str | None, as_json: bool) -> None:
    """Print the running server's own events (with ID, those of that sandbox only): ends, failures and their reasons."""
    config = load_command_config()
    if (id or follow or network) if request is not None else as_json:
        raise click.UsageError("--request goes with --json only, and --json with --request")
    if request is not None:
        show_request(config, request, as_json=as_json)
        return
    query = "?" + urlencode({"sandbox": id}) if id else ""
    with connected_client(config) as client:
        if client is None:
            raise no_server_error(config)
        if follow:
            entries = _follow_entries(client, f"/api/v1/logs/follow{query}")
            _print_lines(network_event_lines(entries) if network else map(format_log_entry, entries))
        elif network:
            _print_lines(sandbox_network_lines(client, id) if id else server_network_lines(client))
        else:
            found = request_json(client, "GET", f"/api/v1/logs{query}")
            _print_lines(
                format_log_entry(responses.decode_json(responses.encode_json(each), responses.LogMessage))
                for each in found
            )


def _print_lines(lines: Iterable[str]) -> None:
    """Prints the lines until Ctrl-C."""
    try:
        for line in lines:
            click.echo(line)
    except KeyboardInterrupt:
        pass


def _follow_entries(client: httpx2.Client, path: str) -> Iterator[responses.LogMessage]:
    """Yields the entries as they are logged. Raises Unavailable when the server ends."""
    try:
        with client.stream("GET", path, timeout=httpx2.Timeout(None)) as response:
            if not response.is_success:
                response.read()
                raise response_error(response)
            events = responses.EventStreamParser()
            for chunk in response.iter_raw():
                yield from (event for event in events.feed(chunk) if isinstance(event, responses.LogMessage))
    except httpx2.HTTPError:
        pass
    raise errors.Unavailable("the server has ended")


def format_log_entry(entry: responses.LogMessage) -> str:
    """Formats an entry: time, level, event and fields."""
    when = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = " ".join(f"{name}={value}" for name, value in entry.fields.items())
    return printable_text(f"{when} {entry.level:<7} {entry.event} {fields}".rstrip())
