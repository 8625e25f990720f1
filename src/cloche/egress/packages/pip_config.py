"""What this host's pip is told about indexes: its files, and its and uv's variables."""

from __future__ import annotations

import configparser
import netrc
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from cloche.egress.packages.urls import basic
from cloche.structs import Struct
from cloche.telemetry import log

MAX_FILE_BYTES = 1 << 20
SECTIONS = ("global", "install")  # the later wins, as in pip


class PipConfig(Struct):
    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    no_index: bool = False
    ca_file: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    find_links: int = 0  # how many, which are not served
    netrc: dict[str, str] = {}  # host -> what is sent to it

    def __repr__(self) -> str:  # URLs can have passwords in them
        return "PipConfig(...)"


def read_pip_config(environ: Mapping[str, str], root: Path) -> PipConfig:
    """Where two say something, variables win over files, and pip's over uv's."""
    values: dict[str, str] = {}
    for path in _files(environ, root):
        values.update(_read(path))
    uv = {"index-url": environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")}
    uv["extra-index-url"] = environ.get("UV_INDEX") or environ.get("UV_EXTRA_INDEX_URL")
    names = ("index-url", "extra-index-url", "no-index", "cert", "trusted-host", "find-links")
    pip = {name: environ.get("PIP_" + name.upper().replace("-", "_")) for name in names}
    values.update({name: value for each in (uv, pip) for name, value in each.items() if value})
    return _config(values, environ, root)


def _config(values: Mapping[str, str], environ: Mapping[str, str], root: Path) -> PipConfig:
    return PipConfig(
        index_url=_unnamed(values.get("index-url", "").strip()),
        extra_index_urls=tuple(_unnamed(each) for each in values.get("extra-index-url", "").split()),
        no_index=values.get("no-index", "").strip().lower() in ("1", "true", "yes", "on"),
        ca_file=values.get("cert", "").strip() or None,
        trusted_hosts=tuple(_host(each) for each in values.get("trusted-host", "").split()),
        find_links=len(values.get("find-links", "").split()),
        netrc=_netrc(environ, root),
    )


def _unnamed(index: str) -> str:
    """uv's indexes can have a name before them: `corp=https://...`."""
    name, equals, url = index.partition("=")
    return url if equals and name.replace("-", "").replace("_", "").isalnum() else index


def _host(text: str) -> str:
    """pip's trusted hosts can have a port, which we do not tell apart."""
    return text.lower() if text.count(":") != 1 else text.lower().partition(":")[0]


def _files(environ: Mapping[str, str], root: Path) -> list[Path]:
    """In pip's order: the later wins."""
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == "/dev/null":
        return []
    home = _home(environ, root)
    xdg = [Path(each) for each in (environ.get("XDG_CONFIG_DIRS") or str(root / "etc/xdg")).split(":") if each]
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    prefix = Path(environ.get("VIRTUAL_ENV") or sys.prefix)
    found = [*(each / "pip/pip.conf" for each in reversed(xdg)), root / "etc/pip.conf"]
    found += [home / ".pip/pip.conf", user / "pip/pip.conf", prefix / "pip.conf"]
    return [*found, Path(chosen)] if chosen else found


def _home(environ: Mapping[str, str], root: Path) -> Path:
    return Path(environ.get("HOME") or root / "root")


def _read(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        parser.read_string(path.read_text("utf-8"))
    except (OSError, UnicodeError):
        return {}
    except configparser.Error:
        log.warning("packages.pip_config_skipped", reason="it is not a configuration of pip")
        return {}
    return dict(_items(parser, SECTIONS))


def _items(parser: configparser.RawConfigParser, sections: Iterable[str]) -> Iterable[tuple[str, str]]:
    for section in sections:
        if parser.has_section(section):
            yield from ((name.replace("_", "-"), value) for name, value in parser.items(section))


def _netrc(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    path = environ.get("NETRC") or str(_home(environ, root) / ".netrc")
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, UnicodeError, netrc.NetrcParseError):
        return {}
    return {
        host.lower(): basic(user, password or "")
        for host, (user, _, password) in hosts.items()
        if host != "default" and user
    }
