"""`cloche config`: prints every key, its value and its origin."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from cloche.cli import load_command_config
from cloche.config import librechat

HIDDEN_VALUE = "***"


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print the configuration and where each value came from. Keys and passwords are not printed."""
    rows = [(key, _printable_value(key, value), origin) for key, value, origin in load_command_config().items()]
    if as_json:
        click.echo(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2))
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        click.echo(f"{key:<{width}} = {json.dumps(value)}  # {origin}")


def _printable_value(key: str, value: Any) -> Any:
    plain = msgspec.to_builtins(value)
    if key == "upstream":
        return [_hide_upstream_secrets(each) for each in plain]
    if key == "packages.pypi":
        return [_hide_password(each) for each in plain]
    if key in librechat.JWT_SECRET_KEYS:
        return _hide_value(plain)
    return _hide_password(plain) if key == "packages.npm" else plain


def _hide_password(url: str) -> str:
    """The URL of an index without its password."""
    scheme, slashes, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    return f"{scheme}{slashes}{HIDDEN_VALUE if user else ''}{at}{host}{slash}{path}"


def _hide_upstream_secrets(upstream: dict[str, Any]) -> dict[str, Any]:
    headers = {name: _hide_value(value) for name, value in upstream["headers"].items()}
    return {**upstream, "api_key": _hide_value(upstream["api_key"]), "headers": headers}


def _hide_value(value: str) -> str:
    return value if not value or value.startswith("env:") else HIDDEN_VALUE
