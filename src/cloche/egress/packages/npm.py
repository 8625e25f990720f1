"""Packages of the npm registries that this host uses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cloche.egress.packages.cache import Digest
from cloche.egress.packages.files import Reference
from cloche.egress.packages.pypi import Page, Pages
from cloche.egress.packages.replies import Made, NotThere, Threads, UpstreamError
from cloche.egress.packages.upstream import BadURL, Upstream, downgrades, join

ABBREVIATED = "application/vnd.npm.install-v1+json"
ACCEPT_ABBREVIATED = f"{ABBREVIATED}; q=1.0, application/json; q=0.8, */*"
ACCEPT_FULL = "application/json"
MAX_VERSION = 256
MEMORY_BYTES = 16 << 20  # of packages as we write them, and as much of their versions
VERSIONS_FACTOR = 3  # so many times a package's length its versions take, or so

_PART = r"[A-Za-z0-9_~][A-Za-z0-9._~!*'()-]{0,213}"
_NAME = re.compile(rf"(@{_PART}/)?{_PART}")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]*")
_ALGORITHMS = {"sha512": 64, "sha384": 48, "sha256": 32}

Packument = dict[str, msgspec.Raw]


class Dist(NamedTuple):
    """Where a version's tarball is, and what proves it."""

    tarball: str
    digest: Digest | None


def is_name(text: str) -> bool:
    return len(text) <= 214 and bool(_NAME.fullmatch(text))


class Npm:
    """`scopes` have registries of their own; every other package is of `registry`."""

    def __init__(self, registry: str, scopes: Mapping[str, str], upstream: Upstream, pages: Pages, threads: Threads):
        self.registry = registry
        self._scopes = dict(scopes)
        self.upstream = upstream
        self._pages = pages
        self._threads = threads
        self._written: Made[Page, bytes] = Made(MEMORY_BYTES, threads)
        self._known: Made[Page, dict[str, Packument]] = Made(MEMORY_BYTES, threads)

    def registry_of(self, name: str) -> str:
        return self._scopes.get(name.partition("/")[0], self.registry)

    async def packument(self, name: str, *, abbreviated: bool, base: str) -> bytes:
        """All versions of a package, with tarballs below `base`. Raises NotThere, UpstreamError."""
        page = await self._page(name, abbreviated)
        prefix = f"{base}/npm/{name}/-/{_unscoped(name)}"
        return await self._written.of(
            page, (prefix, abbreviated), 2 * len(page.body), lambda page: _rewritten(page.body, prefix)
        )

    async def manifest(self, name: str, version: str, *, base: str) -> bytes:
        """One version of a package, which can be named by a tag such as `latest`. Raises NotThere, UpstreamError."""
        page = await self._page(name, abbreviated=False)
        found = await self._threads.run(_manifest, page.body, version, f"{base}/npm/{name}/-/{_unscoped(name)}")
        if found is None:
            raise NotThere("the package has no such version")
        return found

    async def tarball(self, name: str, filename: str) -> Reference:
        """Raises NotThere, UpstreamError."""
        version = filename.removeprefix(_unscoped(name) + "-").removesuffix(".tgz")
        page = await self._page(name, abbreviated=True)
        versions = await self._known.of(page, name, VERSIONS_FACTOR * len(page.body), _versions_of)
        entry = versions.get(version)
        if entry is None or filename != f"{_unscoped(name)}-{version}.tgz":
            raise NotThere("the package has no such version")
        dist = _dist(entry, page.url)
        if dist is None:
            raise NotThere("the registry names no tarball of that version that could be fetched")
        return Reference(dist.tarball, dist.digest)

    async def _page(self, name: str, abbreviated: bool) -> Page:
        url = self.registry_of(name) + name.replace("/", "%2f")
        accept = ACCEPT_ABBREVIATED if abbreviated else ACCEPT_FULL
        return await self._pages.get(self.upstream, url, accept, _checked)


def _unscoped(name: str) -> str:
    return name.rpartition("/")[2]


def _versions_of(page: Page) -> dict[str, Packument]:
    return _versions(_packument(page.body))


def _checked(body: bytes, content_type: str, url: str) -> bytes:
    _versions(_packument(body))
    return body


def _packument(body: bytes) -> Packument:
    try:
        return msgspec.json.decode(body, type=Packument)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UpstreamError("the registry did not answer with a package") from None


def _versions(packument: Packument) -> dict[str, Packument]:
    try:
        return msgspec.json.decode(packument.get("versions", b"{}"), type=dict[str, Packument])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UpstreamError("the registry did not answer with a package's versions") from None


class _DistEntry(msgspec.Struct):
    tarball: str
    integrity: str | None = None
    shasum: str | None = None


def _dist(entry: Packument, base: str) -> Dist | None:
    try:
        dist = msgspec.json.decode(entry.get("dist", b"{}"), type=_DistEntry)
        tarball = join(base, dist.tarball)
        if downgrades(base, tarball):
            return None
    except (msgspec.MsgspecError, ValueError, RecursionError, BadURL):
        return None
    return Dist(tarball, _integrity(dist.integrity or "") or _shasum(dist.shasum or ""))


def _integrity(text: str) -> Digest | None:
    """The strongest hash of a Subresource Integrity value that we can check."""
    said = dict(word.split("?")[0].partition("-")[::2] for word in text.split()[:10])
    for algorithm, size in _ALGORITHMS.items():
        try:
            raw = base64.b64decode(said.get(algorithm, ""), validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(raw) == size:
            return Digest(algorithm, raw.hex())
    return None


def _shasum(text: str) -> Digest | None:
    return Digest("sha1", text.lower()) if re.fullmatch(r"[0-9a-fA-F]{40}", text) else None


def _rewritten(body: bytes, prefix: str) -> bytes:
    packument = _packument(body)
    versions = {
        version: _with_tarball(entry, f"{prefix}-{version}.tgz")
        for version, entry in _versions(packument).items()
        if len(version) <= MAX_VERSION and _VERSION.fullmatch(version)
    }
    return msgspec.json.encode({**packument, "versions": versions})


def _manifest(body: bytes, version: str, prefix: str) -> bytes | None:
    packument = _packument(body)
    version = _tags(packument).get(version, version)
    entry = _versions(packument).get(version)
    if entry is None or not _VERSION.fullmatch(version):
        return None
    return msgspec.json.encode(_with_tarball(entry, f"{prefix}-{version}.tgz"))


def _tags(packument: Packument) -> dict[str, str]:
    try:
        return msgspec.json.decode(packument.get("dist-tags", b"{}"), type=dict[str, str])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def _with_tarball(entry: Packument, url: str) -> Packument:
    try:
        dist = msgspec.json.decode(entry.get("dist", b"{}"), type=Packument)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        dist = {}
    dist["tarball"] = msgspec.Raw(msgspec.json.encode(url))
    return {**entry, "dist": msgspec.Raw(msgspec.json.encode(dist))}
