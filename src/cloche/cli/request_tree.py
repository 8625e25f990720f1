"""`cloche logs --request ID`: what a request for a model's answer did, as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click
import msgspec

from cloche import errors
from cloche.cli.control import ask, client_of, no_server, sockets
from cloche.cli.ps import printable
from cloche.config import Config

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
