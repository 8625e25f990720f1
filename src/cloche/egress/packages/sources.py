"""The package indexes in use: those of Cloche's configuration, else those of this host's pip and npm.

This host's credentials (passwords, tokens) are taken out of URLs and files here, and are sent to their own
host, over their own scheme, by `Keyring` alone.
"""

from __future__ import annotations

import base64
import binascii
import configparser
import netrc
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from cloche import errors
from cloche.config.sections import PackagesConfig
from cloche.egress.packages.upstream import BadURL, Keyring, Origin, basic_authorization, split_userinfo, url_origin
from cloche.structs import Struct
from cloche.telemetry import log

# The index settings of this host's pip: its files, and its and uv's variables.

MAX_PIP_FILE_BYTES = 1 << 20
PIP_SECTIONS = ("global", "install")  # the later wins, as in pip


class PipConfig(Struct):
    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    no_index: bool = False
    ca_file: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    find_links: int = 0  # how many, which are not served
    netrc: dict[str, str] = {}  # host -> the header sent to it

    def __repr__(self) -> str:  # URLs can have passwords in them
        return "PipConfig(...)"


def read_pip_config(environ: Mapping[str, str], root: Path) -> PipConfig:
    """The settings. Variables win over files, and pip's over uv's."""
    values: dict[str, str] = {}
    for path in _pip_files(environ, root):
        values.update(_read_pip_file(path))
    uv = {"index-url": environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")}
    uv["extra-index-url"] = environ.get("UV_INDEX") or environ.get("UV_EXTRA_INDEX_URL")
    names = ("index-url", "extra-index-url", "no-index", "cert", "trusted-host", "find-links")
    pip = {name: environ.get("PIP_" + name.upper().replace("-", "_")) for name in names}
    values.update({name: value for each in (uv, pip) for name, value in each.items() if value})
    return _make_pip_config(values, environ, root)


def _make_pip_config(values: Mapping[str, str], environ: Mapping[str, str], root: Path) -> PipConfig:
    return PipConfig(
        index_url=_strip_index_name(values.get("index-url", "").strip()),
        extra_index_urls=tuple(_strip_index_name(each) for each in values.get("extra-index-url", "").split()),
        no_index=values.get("no-index", "").strip().lower() in ("1", "true", "yes", "on"),
        ca_file=values.get("cert", "").strip() or None,
        trusted_hosts=tuple(_trusted_host(each) for each in values.get("trusted-host", "").split()),
        find_links=len(values.get("find-links", "").split()),
        netrc=_read_netrc(environ, root),
    )


def _strip_index_name(index: str) -> str:
    """uv's indexes can have a name before them: `corp=https://...`."""
    name, equals, url = index.partition("=")
    return url if equals and name.replace("-", "").replace("_", "").isalnum() else index


def _trusted_host(text: str) -> str:
    """pip's trusted hosts can have a port, which we do not tell apart."""
    return text.lower() if text.count(":") != 1 else text.lower().partition(":")[0]


def _pip_files(environ: Mapping[str, str], root: Path) -> list[Path]:
    """The files in pip's order: the later wins."""
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == "/dev/null":
        return []
    home = _home_directory(environ, root)
    xdg = [Path(each) for each in (environ.get("XDG_CONFIG_DIRS") or str(root / "etc/xdg")).split(":") if each]
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    prefix = Path(environ.get("VIRTUAL_ENV") or sys.prefix)
    found = [*(each / "pip/pip.conf" for each in reversed(xdg)), root / "etc/pip.conf"]
    found += [home / ".pip/pip.conf", user / "pip/pip.conf", prefix / "pip.conf"]
    return [*found, Path(chosen)] if chosen else found


def _home_directory(environ: Mapping[str, str], root: Path) -> Path:
    return Path(environ.get("HOME") or root / "root")


def _read_pip_file(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        if path.stat().st_size > MAX_PIP_FILE_BYTES:
            return {}
        parser.read_string(path.read_text("utf-8"))
    except (OSError, UnicodeError):
        return {}
    except configparser.Error:
        log.warning("packages.pip_config_skipped", reason="it is not a configuration of pip")
        return {}
    return dict(_section_items(parser, PIP_SECTIONS))


def _section_items(parser: configparser.RawConfigParser, sections: Iterable[str]) -> Iterable[tuple[str, str]]:
    for section in sections:
        if parser.has_section(section):
            yield from ((name.replace("_", "-"), value) for name, value in parser.items(section))


def _read_netrc(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    path = environ.get("NETRC") or str(_home_directory(environ, root) / ".netrc")
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, UnicodeError, netrc.NetrcParseError):
        return {}
    return {
        host.lower(): basic_authorization(user, password or "")
        for host, (user, _, password) in hosts.items()
        if host != "default" and user
    }


# The registry settings of this host's npm: its files, and its variables.


_NPMRC_VARIABLE = re.compile(r"\$\{([^}$]+)\}")
_HOST_SETTING = re.compile(r"(//[^\s]+/?):(_authToken|_auth|username|_password)")
_NPM_VARIABLE_NAME = re.compile(r"npm_config_(.+)", re.IGNORECASE)


class NpmConfig(Struct):
    registry: str = ""
    scopes: dict[str, str] = {}  # @scope -> registry
    authorizations: dict[str, str] = {}  # //host/path/ -> the header sent there
    ca_file: str | None = None

    def __repr__(self) -> str:
        return "NpmConfig(...)"


def read_npm_config(environ: Mapping[str, str], root: Path) -> NpmConfig:
    """The settings. Variables win over the user's file, and that over the host's."""
    values: dict[str, str] = {}
    for path in _npmrc_files(environ, root):
        values.update(_read_npmrc(path, environ))
    values.update(_npm_variables(environ))
    return NpmConfig(
        registry=values.get("registry", ""),
        scopes={name.partition(":")[0]: url for name, url in values.items() if re.fullmatch(r"@[^:]+:registry", name)},
        authorizations=dict(_npm_authorizations(values)),
        ca_file=values.get("cafile") or None,
    )


def _npmrc_files(environ: Mapping[str, str], root: Path) -> list[Path]:
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


def _read_npmrc(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_PIP_FILE_BYTES:
            return {}
        text = path.read_text("utf-8")
    except (OSError, UnicodeError):
        return {}
    return {name: _expand_variables(value, environ) for name, value in _npmrc_lines(text)}


def _npmrc_lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";", "[")):
            yield name.strip(), value.strip().strip("\"'")


def _expand_variables(value: str, environ: Mapping[str, str]) -> str:
    """`${NAME}` is a variable. One that is not set stays as it is, as with npm, and `${NAME?}` is nothing then."""
    return _NPMRC_VARIABLE.sub(lambda match: _expand_variable(match, environ), value)


def _expand_variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    optional = match[1].endswith("?")
    return environ.get(match[1].removesuffix("?"), "" if optional else match[0])


def _npm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`npm_config_registry`, in any case, and `npm_config_//host/:_authToken`, in its own."""
    found = {}
    for name, value in environ.items():
        match = _NPM_VARIABLE_NAME.fullmatch(name)
        if match and value:
            found[match[1] if "/" in match[1] else match[1].lower()] = value
    return found


def _npm_authorizations(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A token wins over `_auth`, and that over a name and a password."""
    places: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        match = _HOST_SETTING.fullmatch(name)
        if match and value:
            places.setdefault(match[1], {})[match[2]] = value
    for place, known in places.items():
        if "_authToken" in known:
            yield place, f"Bearer {known['_authToken']}"
        elif "_auth" in known:
            yield place, f"Basic {known['_auth']}"
        elif "username" in known and "_password" in known:
            yield place, basic_authorization(known["username"], _decode_password(known["_password"]))


def _decode_password(password: str) -> str:
    try:
        return base64.b64decode(password).decode()
    except (binascii.Error, UnicodeDecodeError):
        return password


DEFAULT_PYPI = "https://pypi.org/simple/"
DEFAULT_NPM = "https://registry.npmjs.org/"


class PackageSources:
    """The indexes and their settings. URLs end with a slash, and have no password in them."""

    def __init__(self) -> None:
        self.pypi: tuple[str, ...] = ()
        self.npm = DEFAULT_NPM
        self.npm_scopes: dict[str, str] = {}
        self.keyring = Keyring()
        self.pypi_ca_file: str | None = None
        self.npm_ca_file: str | None = None
        self.trusted_hosts: frozenset[str] = frozenset()

    @property
    def npm_registries(self) -> tuple[str, ...]:
        """The registries of npm."""
        return (self.npm, *self.npm_scopes.values())

    @property
    def places(self) -> set[tuple[str, int]]:
        """The host and port of each."""
        return {(place.host, place.port) for place in map(url_origin, (*self.pypi, *self.npm_registries))}


def read_sources(
    config: PackagesConfig, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> PackageSources:
    """`root` is where `/etc` is. Raises InvalidConfig for a URL in Cloche's own configuration that leads nowhere."""
    sources = PackageSources()
    _take_pypi(sources, config, environ, root)
    _take_npm(sources, config, environ, root)
    return sources


def _take_pypi(sources: PackageSources, config: PackagesConfig, environ: Mapping[str, str], root: Path) -> None:
    pip = read_pip_config(environ, root)
    if config.pypi:
        sources.pypi = tuple(_configured_url(sources.keyring, url) for url in config.pypi)
    elif not pip.no_index:
        # As in uv: added indexes come first, since the operator chose them, and they can be private.
        found = [*pip.extra_index_urls, pip.index_url or DEFAULT_PYPI]
        sources.pypi = tuple(_usable_urls(sources.keyring, found))
        _log_skipped("pip", len(set(found)) - len(sources.pypi) + pip.find_links)
    sources.pypi_ca_file = pip.ca_file
    sources.trusted_hosts = frozenset(pip.trusted_hosts)
    _take_netrc(sources, pip.netrc)


def _take_netrc(sources: PackageSources, netrc: Mapping[str, str]) -> None:
    """Takes the credentials of the indexes' own hosts only: a page could name any other host of that file, and
    the request would carry them.
    """
    for place in {url_origin(url) for url in sources.pypi}:
        if place.scheme == "https" and place.host in netrc:
            sources.keyring.add(_origin_root(place), netrc[place.host])


def _take_npm(sources: PackageSources, config: PackagesConfig, environ: Mapping[str, str], root: Path) -> None:
    npm = read_npm_config(environ, root)
    if config.npm:
        sources.npm = _configured_url(sources.keyring, config.npm)
    else:
        sources.npm = next(iter(_usable_urls(sources.keyring, [npm.registry])), DEFAULT_NPM)
        for scope, url in npm.scopes.items():
            sources.npm_scopes.update((scope, each) for each in _usable_urls(sources.keyring, [url]))
        _log_skipped("npm", len(npm.scopes) - len(sources.npm_scopes))
    sources.npm_ca_file = npm.ca_file
    _take_tokens(sources, npm.authorizations)


def _take_tokens(sources: PackageSources, authorizations: Mapping[str, str]) -> None:
    """npm's are for a host and a path, without a scheme: they get that of the registry there.

    Those for other hosts, and for other paths of its host, are left out, as with `_take_netrc`.
    """
    for place, authorization in authorizations.items():
        try:
            fit = {url.partition(":")[0] for url in sources.npm_registries if _is_for_registry(place, url)}
        except BadURL:
            log.warning("packages.token_skipped", reason="it is for no host that could be read")
            continue
        for scheme in fit:
            sources.keyring.add(f"{scheme}:{place}", authorization)


def _is_for_registry(place: str, registry: str) -> bool:
    """Whether `//host/path/` has the registry in it, or is in it. Raises BadURL."""
    there = f"{registry.partition(':')[0]}:{place.rstrip('/')}/"
    return url_origin(there) == url_origin(registry) and (_is_below(registry, there) or _is_below(there, registry))


def _is_below(url: str, above: str) -> bool:
    return urlsplit(url).path.startswith(urlsplit(above).path)


def _origin_root(place: Origin) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{place.scheme}://{host}:{place.port}/"


def _configured_url(keyring: Keyring, url: str) -> str:
    try:
        return _strip_password(keyring, url)
    except BadURL as error:
        raise errors.InvalidConfig(f"packages: the URL of an index leads nowhere: {error}") from None


def _usable_urls(keyring: Keyring, urls: Iterable[str]) -> Iterable[str]:
    """The URLs that can be served."""
    for url in dict.fromkeys(urls):
        try:
            yield _strip_password(keyring, url)
        except BadURL:
            continue


def _log_skipped(configuration: str, count: int) -> None:
    """Logs the count once, without the URLs: a directory's path would reveal something about this host."""
    if count:
        reason = "only https and http are served"
        log.info("packages.sources_skipped", configuration=configuration, count=count, reason=reason)


def _strip_password(keyring: Keyring, url: str) -> str:
    """Without its password, which goes to the keyring: for that path first, and for the rest of its host, where such
    indexes as devpi's have their files. pip sends it to the whole host, too."""
    bare, authorization = split_userinfo(url)
    bare = bare if bare.endswith("/") else bare + "/"
    if authorization is not None:
        keyring.add(bare, authorization)
        keyring.add(_origin_root(url_origin(bare)), authorization)
    return bare
