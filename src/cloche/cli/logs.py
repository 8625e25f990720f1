"""`cloche logs`: what the server says about itself. Never a program's output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from urllib.parse import urlencode

import click
import httpx2

from cloche import errors
from cloche.cli import configuration
from cloche.cli.control import ask, connected, error_of, no_server
from cloche.cli.network_lines import of_events, of_sandbox, of_server
from cloche.cli.ps import printable
from cloche.cli.request_tree import show_request
from cloche.protocol import responses


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
            _print(of_events(entries) if network else map(line_of, entries))
        elif network:
            _print(of_sandbox(client, id) if id else of_server(client))
        else:
            found = ask(client, "GET", f"/api/v1/logs{query}")
            _print(line_of(responses.decode(responses.encode(each), responses.Logged)) for each in found)


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


def line_of(entry: responses.Logged) -> str:
    """As a log's line: when, how grave, what, and its fields."""
    when = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = " ".join(f"{name}={value}" for name, value in entry.fields.items())
    return printable(f"{when} {entry.level:<7} {entry.event} {fields}".rstrip())
