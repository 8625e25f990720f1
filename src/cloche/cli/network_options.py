"""Options for a sandbox's network access, shared by `run`, `shell` and `mcp`, and the resulting policy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from cloche import errors

if TYPE_CHECKING:
    from cloche.network_policy import NetworkPolicy, Secret

F = TypeVar("F", bound=Callable[..., Any])

MAX_SECRET_FILE_BYTES = 64 << 10
_SECRET_OPTION = re.compile(r"(?P<domain>[^:=]+):(?P<where>[^=]+)=(?P<kind>env|file):(?P<source>.+)", re.DOTALL)


class NetworkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The network options of a command line."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()  # DOMAIN:HEADER=env:NAME and such: where values are, never values
    packages: bool = False

    @property
    def given(self) -> bool:
        return self != NetworkOptions()


def network_options(command: F) -> F:
    """Adds the options, in a `network` argument."""
    options = (
        click.option("--allow", metavar="HOST", multiple=True, help="Let it reach pypi.org, *.example.com:8443, ..."),
        click.option("--deny", metavar="HOST", multiple=True, help="Exceptions from --allow."),
        click.option(
            "--secret",
            "secrets",
            metavar="DOMAIN:HEADER=env:NAME",
            multiple=True,
            help="Add a header to its requests there, from a variable or a file (file:PATH). It never sees the value.",
        ),
        click.option("--packages", is_flag=True, help="Let pip, uv and npm install, from this machine's own indexes."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_network_options(options: dict[str, Any]) -> NetworkOptions:
    """Takes the options that `network_options` added out of a command's arguments."""
    return NetworkOptions(**{name: options.pop(name) for name in ("allow", "deny", "secrets", "packages")})


def to_network_policy(ask: NetworkOptions) -> NetworkPolicy | None:
    """The policy; None without options. Raises InvalidRequest, which never contains a secret's value."""
    from cloche.network_policy import NetworkPolicy

    if not ask.allow and (ask.deny or ask.secrets):
        raise errors.InvalidRequest("--deny and --secret need an --allow: without one a sandbox reaches nothing")
    if not ask.allow:
        return None
    return NetworkPolicy(allow=ask.allow, deny=ask.deny, secrets=tuple(map(_parse_secret, ask.secrets)))


def _parse_secret(text: str) -> Secret:
    from cloche.network_policy import Secret

    match = _SECRET_OPTION.fullmatch(text)
    if match is None:  # the text can contain a secret's value, so the message does not repeat it
        raise errors.InvalidRequest(
            "--secret must be DOMAIN:HEADER=env:NAME or DOMAIN:HEADER=file:PATH, with $NAME instead of HEADER for a "
            "placeholder: all users of this machine can read command lines, so a literal value is not accepted"
        )
    value = _read_variable(match["source"]) if match["kind"] == "env" else _read_secret_file(match["source"])
    where = {"name": match["where"][1:]} if match["where"].startswith("$") else {"header": match["where"]}
    return Secret(domain=match["domain"], value=value, **where)


def _read_variable(name: str) -> str:
    if not os.environ.get(name):
        raise errors.InvalidRequest(f"--secret: there is no environment variable {name}")
    return os.environ[name]


def _read_secret_file(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(MAX_SECRET_FILE_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise errors.InvalidRequest(f"--secret: cannot read {path}: {why}") from None
