"""Which indexes packages come from: those of Cloche's configuration, else those that this host's pip and npm use.

What proves who this host is (passwords, tokens) is taken out of URLs and files here, and is sent to its own host, over
its own scheme, by `Keyring` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from cloche import errors
from cloche.config.sections import Packages
from cloche.egress.packages.npm_config import read_npm_config
from cloche.egress.packages.pip_config import read_pip_config
from cloche.egress.packages.urls import BadURL, Keyring, Origin, origin, split_userinfo
from cloche.telemetry import log

PYPI = "https://pypi.org/simple/"
NPM = "https://registry.npmjs.org/"


class Sources:
    """URLs end with a slash, and have nobody's password in them."""

    def __init__(self) -> None:
        self.pypi: tuple[str, ...] = ()
        self.npm = NPM
        self.npm_scopes: dict[str, str] = {}
        self.keyring = Keyring()
        self.pypi_ca_file: str | None = None
        self.npm_ca_file: str | None = None
        self.trusted_hosts: frozenset[str] = frozenset()

    @property
    def registries(self) -> tuple[str, ...]:
        """Of npm."""
        return (self.npm, *self.npm_scopes.values())

    @property
    def places(self) -> set[tuple[str, int]]:
        """The host and port of each."""
        return {(place.host, place.port) for place in map(origin, (*self.pypi, *self.registries))}


def read_sources(config: Packages, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Sources:
    """`root` is where `/etc` is. Raises InvalidConfig for a URL in Cloche's own configuration that leads nowhere."""
    sources = Sources()
    _take_pypi(sources, config, environ, root)
    _take_npm(sources, config, environ, root)
    return sources


def _take_pypi(sources: Sources, config: Packages, environ: Mapping[str, str], root: Path) -> None:
    pip = read_pip_config(environ, root)
    if config.pypi:
        sources.pypi = tuple(_chosen(sources.keyring, url) for url in config.pypi)
    elif not pip.no_index:
        # As uv has it: what was added comes first, since it is what somebody here chose, and may be private.
        found = [*pip.extra_index_urls, pip.index_url or PYPI]
        sources.pypi = tuple(_usable(sources.keyring, found))
        _say_skipped("pip", len(set(found)) - len(sources.pypi) + pip.find_links)
    sources.pypi_ca_file = pip.ca_file
    sources.trusted_hosts = frozenset(pip.trusted_hosts)
    _take_netrc(sources, pip.netrc)


def _take_netrc(sources: Sources, netrc: Mapping[str, str]) -> None:
    """For the indexes' own hosts only: of the others in that file a page could name any, to be asked in our name."""
    for place in {origin(url) for url in sources.pypi}:
        if place.scheme == "https" and place.host in netrc:
            sources.keyring.add(_root(place), netrc[place.host])


def _take_npm(sources: Sources, config: Packages, environ: Mapping[str, str], root: Path) -> None:
    npm = read_npm_config(environ, root)
    if config.npm:
        sources.npm = _chosen(sources.keyring, config.npm)
    else:
        sources.npm = next(iter(_usable(sources.keyring, [npm.registry])), NPM)
        for scope, url in npm.scopes.items():
            sources.npm_scopes.update((scope, each) for each in _usable(sources.keyring, [url]))
        _say_skipped("npm", len(npm.scopes) - len(sources.npm_scopes))
    sources.npm_ca_file = npm.ca_file
    _take_tokens(sources, npm.authorizations)


def _take_tokens(sources: Sources, authorizations: Mapping[str, str]) -> None:
    """npm's are for a host and a path, without a scheme: they get that of the registry there.

    Those for other hosts, and for other paths of its host, are left out, as with `_take_netrc`.
    """
    for place, authorization in authorizations.items():
        try:
            fit = {url.partition(":")[0] for url in sources.registries if _is_of(place, url)}
        except BadURL:
            log.warning("packages.token_skipped", reason="it is for no host that could be read")
            continue
        for scheme in fit:
            sources.keyring.add(f"{scheme}:{place}", authorization)


def _is_of(place: str, registry: str) -> bool:
    """Whether `//host/path/` has the registry in it, or is in it. Raises BadURL."""
    there = f"{registry.partition(':')[0]}:{place.rstrip('/')}/"
    return origin(there) == origin(registry) and (_is_below(registry, there) or _is_below(there, registry))


def _is_below(url: str, above: str) -> bool:
    return urlsplit(url).path.startswith(urlsplit(above).path)


def _root(place: Origin) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{place.scheme}://{host}:{place.port}/"


def _chosen(keyring: Keyring, url: str) -> str:
    try:
        return _kept(keyring, url)
    except BadURL as error:
        raise errors.InvalidConfig(f"packages: the URL of an index leads nowhere: {error}") from None


def _usable(keyring: Keyring, urls: Iterable[str]) -> Iterable[str]:
    """Those that can be served."""
    for url in dict.fromkeys(urls):
        try:
            yield _kept(keyring, url)
        except BadURL:
            continue


def _say_skipped(whose: str, count: int) -> None:
    """Once, and without what they are: a directory's path says something about this host."""
    if count:
        reason = "only https and http are served"
        log.info("packages.sources_skipped", configuration=whose, count=count, reason=reason)


def _kept(keyring: Keyring, url: str) -> str:
    """Without its password, which goes to the keyring: for that path first, and for the rest of its host, where such
    indexes as devpi's have their files. pip sends it to the whole host, too."""
    bare, authorization = split_userinfo(url)
    bare = bare if bare.endswith("/") else bare + "/"
    if authorization is not None:
        keyring.add(bare, authorization)
        keyring.add(_root(origin(bare)), authorization)
    return bare
