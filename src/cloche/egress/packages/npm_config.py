"""What this host's npm is told about registries: its files, and its variables."""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from cloche.egress.packages.urls import basic
from cloche.structs import Struct

MAX_FILE_BYTES = 1 << 20

_VARIABLE = re.compile(r"\$\{([^}$]+)\}")
_OF_PLACE = re.compile(r"(//[^\s]+/?):(_authToken|_auth|username|_password)")
_VARIABLES = re.compile(r"npm_config_(.+)", re.IGNORECASE)


class NpmConfig(Struct):
    registry: str = ""
    scopes: dict[str, str] = {}  # @scope -> registry
    authorizations: dict[str, str] = {}  # //host/path/ -> what is sent there
    ca_file: str | None = None

    def __repr__(self) -> str:
        return "NpmConfig(...)"


def read_npm_config(environ: Mapping[str, str], root: Path) -> NpmConfig:
    """Where two say something, variables win over the user's file, and that over the host's."""
    values: dict[str, str] = {}
    for path in _files(environ, root):
        values.update(_read(path, environ))
    values.update(_variables(environ))
    return NpmConfig(
        registry=values.get("registry", ""),
        scopes={name.partition(":")[0]: url for name, url in values.items() if re.fullmatch(r"@[^:]+:registry", name)},
        authorizations=dict(_authorizations(values)),
        ca_file=values.get("cafile") or None,
    )


def _files(environ: Mapping[str, str], root: Path) -> list[Path]:
    home = Path(environ.get("HOME") or root / "root")
    settings = {name.lower(): value for name, value in environ.items() if value}
    found = [root / "etc/npmrc", *_near_npm(environ)]
    if "npm_config_globalconfig" in settings:
        found = [Path(settings["npm_config_globalconfig"])]
    return [*found, Path(settings.get("npm_config_userconfig") or home / ".npmrc")]


def _near_npm(environ: Mapping[str, str]) -> list[Path]:
    """`PREFIX/etc/npmrc`, where npm is `PREFIX/bin/npm`."""
    prefix = environ.get("PREFIX")
    npm = shutil.which("npm", path=environ.get("PATH"))
    prefixes = [prefix] if prefix else [os.path.dirname(os.path.dirname(npm))] if npm else []
    return [Path(each) / "etc/npmrc" for each in prefixes]


def _read(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        text = path.read_text("utf-8")
    except (OSError, UnicodeError):
        return {}
    return {name: _expanded(value, environ) for name, value in _lines(text)}


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";", "[")):
            yield name.strip(), value.strip().strip("\"'")


def _expanded(value: str, environ: Mapping[str, str]) -> str:
    """`${NAME}` is a variable. One that is not set stays as it is, as with npm, and `${NAME?}` is nothing then."""
    return _VARIABLE.sub(lambda match: _variable(match, environ), value)


def _variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    optional = match[1].endswith("?")
    return environ.get(match[1].removesuffix("?"), "" if optional else match[0])


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`npm_config_registry`, in any case, and `npm_config_//host/:_authToken`, in its own."""
    found = {}
    for name, value in environ.items():
        match = _VARIABLES.fullmatch(name)
        if match and value:
            found[match[1] if "/" in match[1] else match[1].lower()] = value
    return found


def _authorizations(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A token wins over `_auth`, and that over a name and a password."""
    places: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        match = _OF_PLACE.fullmatch(name)
        if match and value:
            places.setdefault(match[1], {})[match[2]] = value
    for place, known in places.items():
        if "_authToken" in known:
            yield place, f"Bearer {known['_authToken']}"
        elif "_auth" in known:
            yield place, f"Basic {known['_auth']}"
        elif "username" in known and "_password" in known:
            yield place, basic(known["username"], _decoded(known["_password"]))


def _decoded(password: str) -> str:
    try:
        return base64.b64decode(password).decode()
    except (binascii.Error, UnicodeDecodeError):
        return password
