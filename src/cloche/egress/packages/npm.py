"""Packages of the npm registries that this host uses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cloche.egress.packages.cache import FileDigest
from cloche.egress.packages.files import FileReference
from cloche.egress.packages.pypi import IndexPage, IndexPages
from cloche.egress.packages.replies import DerivedMemory, NotInIndex, PackageThreads, UpstreamError
from cloche.egress.packages.upstream import BadURL, IndexClient, gives_up_tls, join_url
from cloche.json_text import JsonBounds, check_json

ABBREVIATED = "application/vnd.npm.install-v1+json"
ACCEPT_ABBREVIATED = f"{ABBREVIATED}; q=1.0, application/json; q=0.8, */*"
ACCEPT_FULL = "application/json"
MAX_VERSION = 256
_PACKUMENT_BOUNDS = JsonBounds(values=3_000_000, plain_bytes=32 << 20)  # some list thousands of versions
NPM_MEMORY_BYTES = 16 << 20  # of rendered packages, and as much of their versions
VERSIONS_FACTOR = 3  # approximate memory of the versions, as a multiple of the package's length

_PART = r"[A-Za-z0-9_~][A-Za-z0-9._~!*'()-]{0,213}"
_NAME = re.compile(rf"(@{_PART}/)?{_PART}")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]*")
_ALGORITHMS = {"sha512": 64, "sha384": 48, "sha256": 32}

Packument = dict[str, msgspec.Raw]


class NpmDist(NamedTuple):
    """The URL of a version's tarball, and its digest."""

    tarball: str
    digest: FileDigest | None


def is_npm_name(text: str) -> bool:
    return len(text) <= 214 and bool(_NAME.fullmatch(text))


class NpmRegistries:
    """`scopes` have registries of their own; every other package is of `registry`."""

    def __init__(
        self,
        registry: str,
        scopes: Mapping[str, str],
        upstream: IndexClient,
        pages: IndexPages,
        threads: PackageThreads,
    ):
        self.registry = registry
        self._scopes = dict(scopes)
        self.upstream = upstream
        self._pages = pages
        self._threads = threads
        self._written: DerivedMemory[IndexPage, bytes] = DerivedMemory(NPM_MEMORY_BYTES, threads)
        self._known: DerivedMemory[IndexPage, dict[str, Packument]] = DerivedMemory(NPM_MEMORY_BYTES, threads)

    def registry_of(self, name: str) -> str:
        return self._scopes.get(name.partition("/")[0], self.registry)

    async def fetch_packument(self, name: str, *, abbreviated: bool, base: str) -> bytes:
        """All versions of a package, with tarballs below `base`. Raises NotInIndex, UpstreamError."""
        page = await self._fetch_page(name, abbreviated)
        prefix = f"{base}/npm/{name}/-/{_unscoped_name(name)}"
        return await self._written.of(
            page, (prefix, abbreviated), 2 * len(page.body), lambda page: _rewrite_packument(page.body, prefix)
        )

    async def fetch_manifest(self, name: str, version: str, *, base: str) -> bytes:
        """One version of a package, which can be named by a tag such as `latest`. Raises NotInIndex, UpstreamError."""
        page = await self._fetch_page(name, abbreviated=False)
        found = await self._threads.run(
            _version_manifest, page.body, version, f"{base}/npm/{name}/-/{_unscoped_name(name)}"
        )
        if found is None:
            raise NotInIndex("the package has no such version")
        return found

    async def tarball(self, name: str, filename: str) -> FileReference:
        """Raises NotInIndex, UpstreamError."""
        version = filename.removeprefix(_unscoped_name(name) + "-").removesuffix(".tgz")
        page = await self._fetch_page(name, abbreviated=True)
        versions = await self._known.of(page, name, VERSIONS_FACTOR * len(page.body), _page_versions)
        entry = versions.get(version)
        if entry is None or filename != f"{_unscoped_name(name)}-{version}.tgz":
            raise NotInIndex("the package has no such version")
        dist = _parse_dist(entry, page.url)
        if dist is None:
            raise NotInIndex("the registry names no tarball of that version that could be fetched")
        return FileReference(dist.tarball, dist.digest)

    async def _fetch_page(self, name: str, abbreviated: bool) -> IndexPage:
        url = self.registry_of(name) + name.replace("/", "%2f")
        accept = ACCEPT_ABBREVIATED if abbreviated else ACCEPT_FULL
        return await self._pages.get(self.upstream, url, accept, _check_packument)


def _unscoped_name(name: str) -> str:
    return name.rpartition("/")[2]


def _page_versions(page: IndexPage) -> dict[str, Packument]:
    return _decode_versions(_decode_packument(page.body))


def _check_packument(body: bytes, content_type: str, url: str) -> bytes:
    _decode_versions(_decode_packument(body))
    return body


def _decode_packument(body: bytes) -> Packument:
    try:
        check_json(body, _PACKUMENT_BOUNDS)
        return msgspec.json.decode(body, type=Packument)
    except (msgspec.MsgspecError, ValueError):
        raise UpstreamError("the registry did not answer with a package") from None


def _decode_versions(packument: Packument) -> dict[str, Packument]:
    try:
        return msgspec.json.decode(packument.get("versions", b"{}"), type=dict[str, Packument])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UpstreamError("the registry did not answer with a package's versions") from None


class _NpmDistFields(msgspec.Struct):
    tarball: str
    integrity: str | None = None
    shasum: str | None = None


def _parse_dist(entry: Packument, base: str) -> NpmDist | None:
    try:
        dist = msgspec.json.decode(entry.get("dist", b"{}"), type=_NpmDistFields)
        tarball = join_url(base, dist.tarball)
        if gives_up_tls(base, tarball):
            return None
    except (msgspec.MsgspecError, ValueError, RecursionError, BadURL):
        return None
    return NpmDist(tarball, _parse_integrity(dist.integrity or "") or _parse_shasum(dist.shasum or ""))


def _parse_integrity(text: str) -> FileDigest | None:
    """The strongest hash of a Subresource Integrity value that we can check."""
    said = dict(word.split("?")[0].partition("-")[::2] for word in text.split()[:10])
    for algorithm, size in _ALGORITHMS.items():
        try:
            raw = base64.b64decode(said.get(algorithm, ""), validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(raw) == size:
            return FileDigest(algorithm, raw.hex())
    return None


def _parse_shasum(text: str) -> FileDigest | None:
    return FileDigest("sha1", text.lower()) if re.fullmatch(r"[0-9a-fA-F]{40}", text) else None


def _rewrite_packument(body: bytes, prefix: str) -> bytes:
    packument = _decode_packument(body)
    versions = {
        version: _with_tarball(entry, f"{prefix}-{version}.tgz")
        for version, entry in _decode_versions(packument).items()
        if len(version) <= MAX_VERSION and _VERSION.fullmatch(version)
    }
    return msgspec.json.encode({**packument, "versions": versions})


def _version_manifest(body: bytes, version: str, prefix: str) -> bytes | None:
    packument = _decode_packument(body)
    version = _decode_tags(packument).get(version, version)
    entry = _decode_versions(packument).get(version)
    if entry is None or not _VERSION.fullmatch(version):
        return None
    return msgspec.json.encode(_with_tarball(entry, f"{prefix}-{version}.tgz"))


def _decode_tags(packument: Packument) -> dict[str, str]:
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
