"""`cloche config`: every key, its value, and where it came from."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from cloche.cli import configuration
from cloche.config import librechat

HIDDEN = "***"


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print the configuration and where each value came from. Keys and passwords are not printed."""
    rows = [(key, _printed(key, value), origin) for key, value, origin in configuration().items()]
    if as_json:
        click.echo(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2))
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        click.echo(f"{key:<{width}} = {json.dumps(value)}  # {origin}")


def _printed(key: str, value: Any) -> Any:
    plain = msgspec.to_builtins(value)
    if key == "upstream":
        return [_without_secrets(each) for each in plain]
    if key == "packages.pypi":
        return [_without_password(each) for each in plain]
    if key in librechat.MAY_HOLD_SECRETS:
        return _hidden(plain)
    return _without_password(plain) if key == "packages.npm" else plain


def _without_password(url: str) -> str:
    """Indexes may want one, in their URL."""
    scheme, slashes, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    return f"{scheme}{slashes}{HIDDEN if user else ''}{at}{host}{slash}{path}"


def _without_secrets(upstream: dict[str, Any]) -> dict[str, Any]:
    headers = {name: _hidden(value) for name, value in upstream["headers"].items()}
    return {**upstream, "api_key": _hidden(upstream["api_key"]), "headers": headers}


def _hidden(value: str) -> str:
    return value if not value or value.startswith("env:") else HIDDEN
