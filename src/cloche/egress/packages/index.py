"""The package index of sandboxes: requests of `pip`, `uv` and `npm`, one after another on a connection."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_to_bytes
from weakref import WeakKeyDictionary

import msgspec

from cloche.config.sections import NetworkConfig, PackagesConfig
from cloche.egress import http1
from cloche.egress.connect import ResolveName
from cloche.egress.door import EgressConnection, SandboxEgress
from cloche.egress.journal import ConnectionAttempt
from cloche.egress.packages import pypi
from cloche.egress.packages.cache import PackageCache
from cloche.egress.packages.files import CHUNK_BYTES, FileBody, FileReference, PackageFiles
from cloche.egress.packages.npm import ABBREVIATED, NpmRegistries, is_npm_name
from cloche.egress.packages.pypi import IndexPages, PypiIndexes
from cloche.egress.packages.replies import NotInIndex, PackageThreads, UpstreamError
from cloche.egress.packages.sources import PackageSources, read_sources
from cloche.egress.packages.upstream import IndexClient, IndexReach, url_origin
from cloche.egress.rules import Destination
from cloche.egress.streams import Verdict

# The request and byte limits of one sandbox at the package index, and the packages that the operator
# allows.

PACKAGE_KINDS = ("pypi", "npm")
REQUESTS_AT_ONCE = 16  # of one sandbox that are seen to, so that there is room for others; the rest wait
NOTED_SECONDS = 60.0  # for which the reason of a refusal is kept
PAGES_AT_ONCE = 4  # of one sandbox: they are in memory, and can be large


class AllowanceExceeded(Exception):
    """A limit was exceeded. Its text names the limit, for the program and for the log."""

    def __init__(self, why: str, status: int):
        super().__init__(why)
        self.status = status


class PackageAllowance:
    """The limits of one sandbox: requests per minute, with a minute's worth at once, and bytes in its life."""

    def __init__(self, config: PackagesConfig):
        self._per_minute = config.requests_per_minute
        self._sandbox_bytes = config.sandbox_bytes
        self._requests = float(config.requests_per_minute)
        self._at = time.monotonic()
        self._taken_bytes = 0
        self._refused, self._refused_at = "", 0.0
        self.requests = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self.pages = asyncio.Semaphore(PAGES_AT_ONCE)

    def ask(self) -> None:
        """Raises AllowanceExceeded."""
        now = time.monotonic()
        self._requests = min(self._per_minute, self._requests + (now - self._at) * self._per_minute / 60)
        self._at = now
        if self._requests < 1:
            raise AllowanceExceeded(
                f"a sandbox may ask the package index {self._per_minute} times a minute: wait a little", 429
            )
        self._requests -= 1

    def check(self, count: int) -> None:
        """Whether so many bytes may be taken. Raises AllowanceExceeded."""
        if self._taken_bytes + count > self._sandbox_bytes:
            raise AllowanceExceeded(f"a sandbox may take {self._sandbox_bytes} bytes of packages in its life", 403)

    def take(self, count: int) -> None:
        """Raises AllowanceExceeded."""
        self.check(count)
        self._taken_bytes += count

    def note_refusal(self, why: str) -> None:
        self._refused, self._refused_at = why, time.monotonic()

    def last_refusal(self) -> str:
        """The reason of the last refusal, a moment ago. It is returned once."""
        why, self._refused = self._refused, ""
        return why if time.monotonic() - self._refused_at < NOTED_SECONDS else ""


class AllowedPackages:
    """Which packages the operator allows. `deny` comes first; `pypi:` or `npm:` before a name means one kind only."""

    def __init__(self, config: PackagesConfig):
        self._allow = {kind: _kind_patterns(kind, config.allow) for kind in PACKAGE_KINDS}
        self._deny = {kind: _kind_patterns(kind, config.deny) for kind in PACKAGE_KINDS}

    def allows(self, kind: str, name: str) -> bool:
        """A project's name is normalised."""
        plain = name.lower()
        return not _matches_any(self._deny[kind], plain) and _matches_any(self._allow[kind], plain)


def _kind_patterns(kind: str, patterns: Iterable[str]) -> list[str]:
    found = []
    for pattern in patterns:
        before, colon, name = pattern.strip().lower().rpartition(":")
        if not colon or before == kind:
            found.append(re.sub(r"[-_.]+", "-", name) if kind == "pypi" else name)
    return found


def _matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# One request of a program to the package index, and the answer to it.

MAX_SEGMENTS = 8
STATUS_PHRASES = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    403: "Denied by package policy",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    502: "Bad Gateway",
}

DENIED_STATUS = 403
REMEMBERED_STATUSES = frozenset({DENIED_STATUS, 429, 502})  # pip and uv do not show the text of these

_SEGMENT = re.compile(rb"[\x20-\x7e]{1,300}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9a-fA-F:]{2,45}\](:[0-9]{1,5})?")
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


class ByteRange(NamedTuple):
    start: int
    stop: int


def path_segments(target: str) -> list[str] | None:
    """The segments of a path, each decoded once: a slash in one does not split it. None for an invalid path."""
    parts = [unquote_to_bytes(part) for part in target.partition("?")[0].split("/")[1:]]
    if parts and parts[-1] == b"":
        parts.pop()
    if len(parts) > MAX_SEGMENTS or not all(_SEGMENT.fullmatch(part) and part not in (b".", b"..") for part in parts):
        return None
    return [part.decode() for part in parts]


class PackageRequest:
    """One request. `keeps`: whether the connection can have another request after it; none after a refusal.

    Raises BadRequest where its body's length can be read in two ways. No body is ever read: it ends the
    connection.
    """

    def __init__(self, visit: EgressConnection, head: http1.HttpHead, allowance: PackageAllowance):
        self.visit = visit
        self.head = head
        self.allowance = allowance
        self.has_begun = False
        self.has_body = head.body_length != 0
        asked = {word.strip().lower() for value in head.all("connection") for word in value.split(",")}
        self.keeps = head.start[2] == "HTTP/1.1" and "close" not in asked

    @property
    def accept(self) -> str:
        return ", ".join(self.head.all("accept"))

    @property
    def base(self) -> str:
        """Where the program thinks that we are. Raises BadRequest."""
        host = self.head.single_value("host") or ""
        if not _HOST.fullmatch(host):
            raise http1.BadRequest("the header host names none")
        return f"http://{host}"

    async def refuse(self, status: int, why: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Sends a short reason, which is not charged to the allowance, and ends the connection."""
        if status in REMEMBERED_STATUSES and self.head.target.startswith("/pypi/"):
            self.allowance.note_refusal(why)
        kind, body = self._error_body(why)
        self._begin_answer(status, len(body), [("content-type", kind), *headers])
        if self.head.method != "HEAD":
            self.visit.writer.write(body)
            await self._drain_writer()

    def _error_body(self, why: str) -> tuple[str, bytes]:
        """The content type and body of a refusal: JSON for npm, else plain text."""
        if self.head.target.startswith("/npm/"):
            return "application/json", msgspec.json.encode({"error": f"Cloche: {why}"})
        return "text/plain; charset=utf-8", f"Cloche: {why}\n".encode()

    async def content(self, content_type: str, body: bytes) -> None:
        """Raises AllowanceExceeded."""
        headers = [("content-type", content_type), ("cache-control", "no-cache"), ("vary", "accept")]
        self.allowance.check(len(body))
        self._begin_answer(200, len(body), headers)
        if self.head.method != "HEAD":
            self.allowance.take(len(body))
            view = memoryview(body)
            for start in range(0, len(body), CHUNK_BYTES):
                await self._send_part(view[start : start + CHUNK_BYTES])

    async def file(self, body: FileBody, tag: str) -> None:
        """Or the part of it that was asked for. Not to be kept inside: the host has it.

        Raises AllowanceExceeded, UpstreamError.
        """
        headers = [("content-type", "application/octet-stream"), ("cache-control", "no-store"), ("etag", f'"{tag}"')]
        span = self._requested_range(body, tag)
        if span is None:
            self._begin_answer(416, 0, [("content-range", f"bytes */{body.size}")])
            return
        if body.has_ranges:
            headers.append(("accept-ranges", "bytes"))
        is_part = span != (0, body.size)
        if is_part:
            headers.append(("content-range", f"bytes {span.start}-{span.stop - 1}/{body.size}"))
        await self._send_file(body, span, 206 if is_part else 200, headers)

    async def _send_file(self, body: FileBody, span: ByteRange, status: int, headers: list[tuple[str, str]]) -> None:
        # The host fetches the whole file now, and makes room for it: a client that leaves early pays for all of it,
        # and so is a request for its head only.
        is_head = self.head.method == "HEAD"
        paid_bytes = body.size if not body.is_here else 0 if is_head else span.stop - span.start
        self.allowance.take(paid_bytes)
        if is_head:
            self._begin_answer(status, span.stop - span.start, headers)
            return
        async for part in body.parts(*span):
            if not self.has_begun:  # only now: before its first bytes were checked there may be an error to tell
                self._begin_answer(status, span.stop - span.start, headers)
            await self._send_part(part)
        if not self.has_begun:
            self._begin_answer(status, 0, headers)

    def _requested_range(self, body: FileBody, tag: str) -> ByteRange | None:
        """The requested range; None where there is no such part."""
        whole = ByteRange(0, body.size)
        match = _RANGE.fullmatch(self.head.single_value("range") or "")
        only_if = self.head.single_value("if-range")
        if match is None or not body.has_ranges or only_if not in (None, f'"{tag}"'):
            return whole
        first, last = match[1], match[2]
        if not first:
            return ByteRange(max(0, body.size - int(last)), body.size) if last and int(last) and body.size else None
        stop = min(int(last) + 1, body.size) if last else body.size
        return ByteRange(int(first), stop) if int(first) < stop else None

    def _begin_answer(self, status: int, length: int, headers: Iterable[tuple[str, str]]) -> None:
        self.has_begun = True
        if status >= 400:  # or a program could repeat refused requests as fast as it can write
            self.keeps = False
        self.visit.attempt.let_through = status < 300
        said = [*headers, ("content-length", str(length)), ("connection", "keep-alive" if self.keeps else "close")]
        package = self.visit.attempt.package if status == DENIED_STATUS else ""
        phrase = STATUS_PHRASES[status] + (f": {package}" if package else "")
        self.visit.writer.write(http1.write_head(f"HTTP/1.1 {status} {phrase}", said))

    async def _send_part(self, part: bytes | memoryview) -> None:
        """Raises AllowanceExceeded."""
        self.visit.attempt.received_bytes += len(part)
        self.visit.writer.write(part)
        await self._drain_writer()

    async def _drain_writer(self) -> None:
        try:
            async with asyncio.timeout(self.visit.door.config.idle_seconds):
                await self.visit.writer.drain()
        except TimeoutError:
            raise AllowanceExceeded("the program does not read the response", 408) from None


IDLE_SECONDS = 60.0  # between two requests on one connection
TOO_MANY_PAUSE_SECONDS = 0.5  # before a client with too many requests gets the refusal
TOO_MANY_STATUS = 429


class PackageRefused(Exception):
    """Its text is the reason for the program; `reason` is that for the log, without names from the program."""

    def __init__(self, status: int, why: str, reason: str):
        super().__init__(why)
        self.status = status
        self.reason = reason


class PackageIndex:
    """The index, one for all sandboxes of this process. Its maker closes it."""

    def __init__(self, config: PackagesConfig, network: NetworkConfig, resolve: ResolveName, directory: Path):
        sources = read_sources(config)
        cache = PackageCache(directory, config.cache_bytes)
        self._config = config
        self._names = AllowedPackages(config)
        self._threads = threads = PackageThreads()
        self._pages = pages = IndexPages(cache, threads, config.index_seconds)
        self._files = PackageFiles(cache, threads, config.file_bytes, config.index_seconds)
        reach = IndexReach(resolve, sources.places, network.internal_ranges)
        pypi, npm = (_make_client(sources, reach, file) for file in (sources.pypi_ca_file, sources.npm_ca_file))
        self._pypi = PypiIndexes(sources.pypi, pypi, pages, threads)
        self._npm = NpmRegistries(sources.npm, sources.npm_scopes, npm, pages, threads)
        self._allowances: WeakKeyDictionary[SandboxEgress, PackageAllowance] = WeakKeyDictionary()

    @property
    def opened_files(self) -> dict[str, int]:
        """How many were in the cache, `hit`, and how many were not, `miss`."""
        return self._files.opened

    async def serve(self, visit: EgressConnection, head: http1.HttpHead) -> None:
        """That request, and those after it on the connection. Raises BadRequest."""
        allowance = self._allowances.setdefault(visit.door, PackageAllowance(self._config))
        following: http1.HttpHead | None = head
        while following is not None:
            visit.attempt.protocol = "package"
            exchange = PackageRequest(visit, following, allowance)
            await self._answer_request(exchange)
            if not exchange.keeps:
                return
            await asyncio.sleep(0)  # requests that were read ahead can be answered without ever waiting
            following = await _next_request(visit)

    async def _answer_request(self, exchange: PackageRequest) -> None:
        """Writes the answer, and the line in the log."""
        attempt = exchange.visit.attempt
        try:
            exchange.allowance.ask()
            async with exchange.allowance.requests:
                await self._route_request(exchange)
            attempt.end("allowed")
        except PackageRefused as refused:
            await _refuse_request(exchange, refused.status, str(refused), "denied", refused.reason)
        except AllowanceExceeded as exceeded:
            await _refuse_request(exchange, exceeded.status, str(exceeded), "denied", str(exceeded))
        except NotInIndex as error:
            await _refuse_request(exchange, 404, str(error), "failed", str(error))
        except UpstreamError as error:
            await _refuse_request(exchange, 502, str(error), "failed", str(error))

    async def _route_request(self, exchange: PackageRequest) -> None:
        match path_segments(exchange.head.target):
            case ["npm", "-", *_]:  # audits, search, accounts: npm continues without them
                raise PackageRefused(404, "the package index has packages only", "not a package")
            case _ if exchange.head.method not in ("GET", "HEAD"):
                raise PackageRefused(405, "the package index can only be read", "not a read")
            case _ if exchange.has_body:
                raise PackageRefused(400, "a request to the package index has no body", "a body")
            case ["refused"]:
                await self._serve_last_refusal(exchange)
            case ["pypi", "simple", name]:
                await self._serve_project(exchange, self._checked_project(exchange, name))
            case ["pypi", "files", name, filename]:
                await self._serve_pypi_file(exchange, self._checked_project(exchange, name), filename)
            case ["npm", *scope, name, "-", filename] if len(scope) < 2:
                await self._serve_tarball(exchange, self._checked_package(exchange, [*scope, name]), filename)
            case ["npm", *words, version] if is_npm_name("/".join(words)):
                await self._serve_manifest(exchange, self._checked_package(exchange, words), version)
            case ["npm", *words] if 0 < len(words) < 3:
                await self._serve_packument(exchange, self._checked_package(exchange, words))
            case _:
                raise PackageRefused(
                    404, "there is nothing here: pip's index is /pypi/simple/, npm's is /npm/", "not a package"
                )

    async def _serve_last_refusal(self, exchange: PackageRequest) -> None:
        """Answers with the last refusal, once: a request without a refusal since gets 404."""
        why = exchange.allowance.last_refusal()
        if not why:
            await exchange.refuse(404, "nothing was refused")
            return
        await exchange.content("text/plain; charset=utf-8", f"Cloche: {why}\n".encode())

    async def _serve_project(self, exchange: PackageRequest, name: str) -> None:
        async with exchange.allowance.pages:
            as_json = pypi.wants_json(exchange.accept)
            index, body = await self._pypi.project_page(name, as_json)
            _name_host(exchange, index)
            await exchange.content(pypi.SIMPLE_JSON if as_json else "text/html; charset=utf-8", body)

    async def _serve_pypi_file(self, exchange: PackageRequest, project: str, filename: str) -> None:
        index, reference = await self._pypi.file(project, filename)
        _name_host(exchange, index)
        await self._serve_file(exchange, self._pypi.upstream, reference)

    async def _serve_packument(self, exchange: PackageRequest, name: str) -> None:
        is_short = ABBREVIATED in exchange.accept
        async with exchange.allowance.pages:
            body = await self._npm.fetch_packument(name, abbreviated=is_short, base=exchange.base)
            await exchange.content(ABBREVIATED if is_short else "application/json", body)

    async def _serve_manifest(self, exchange: PackageRequest, name: str, version: str) -> None:
        async with exchange.allowance.pages:
            body = await self._npm.fetch_manifest(name, version, base=exchange.base)
            await exchange.content("application/json", body)

    async def _serve_tarball(self, exchange: PackageRequest, name: str, filename: str) -> None:
        await self._serve_file(exchange, self._npm.upstream, await self._npm.tarball(name, filename))

    async def _serve_file(self, exchange: PackageRequest, upstream: IndexClient, reference: FileReference) -> None:
        exchange.allowance.check(1)  # or nothing is begun
        async with self._files.open(upstream, reference) as body:
            await exchange.file(body, reference.key)

    def _checked_project(self, exchange: PackageRequest, text: str) -> str:
        if not self._pypi.indexes:
            raise PackageRefused(404, "this host has no index of Python packages", "there is no index")
        _name_host(exchange, self._pypi.indexes[0])
        name = pypi.normalise_name(text)
        if name is None:
            raise PackageRefused(404, f"{text[:100]!r} is not the name of a project", "not the name of a project")
        self._check_name(exchange, "pypi", name)
        return name

    def _checked_package(self, exchange: PackageRequest, words: list[str]) -> str:
        name = "/".join(words)
        if not is_npm_name(name):
            raise PackageRefused(404, f"{name[:100]!r} is not the name of a package", "not the name of a package")
        _name_host(exchange, self._npm.registry_of(name))
        self._check_name(exchange, "npm", name)
        return name

    def _check_name(self, exchange: PackageRequest, kind: str, name: str) -> None:
        exchange.visit.attempt.package = f"{kind}:{name}"  # for auditors
        if not self._names.allows(kind, name):
            raise PackageRefused(
                403,
                f"the operator of this host does not allow the package {name} (packages.allow, packages.deny)",
                "the operator does not allow that package",
            )

    async def aclose(self) -> None:
        await self._pages.aclose()
        await self._files.aclose()
        await self._pypi.upstream.aclose()
        await self._npm.upstream.aclose()
        self._threads.close()


def _make_client(sources: PackageSources, reach: IndexReach, ca_file: str | None) -> IndexClient:
    return IndexClient(sources.keyring, reach, ca_file, sources.trusted_hosts)


async def _next_request(visit: EgressConnection) -> http1.HttpHead | None:
    """The next request, with a line of its own in the log. None where none comes. Raises BadRequest."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            head = await http1.read_head(visit.reader)
    except TimeoutError:
        return None
    except http1.BadRequest:
        visit.attempt = ConnectionAttempt(visit.door.journal, "package")
        raise
    if head is None:
        return None
    visit.attempt = ConnectionAttempt(visit.door.journal, "package")
    if not head.target.startswith("/"):
        raise http1.BadRequest("this connection is to the package index: use another one for other hosts")
    return head


async def _refuse_request(exchange: PackageRequest, status: int, why: str, verdict: Verdict, reason: str) -> None:
    """Sends the reason. An answer that has begun already is broken off: a program must not take it for whole."""
    exchange.visit.attempt.end(verdict, reason)
    if exchange.has_begun:
        exchange.keeps = False
        exchange.visit.writer.transport.abort()
    elif status == TOO_MANY_STATUS:
        await asyncio.sleep(TOO_MANY_PAUSE_SECONDS)  # its connection waits too, and connections are limited
        await exchange.refuse(status, why, [("retry-after", "1")])  # installers obey it
    else:
        await exchange.refuse(status, why)


def _name_host(exchange: PackageRequest, index: str) -> None:
    place = url_origin(index)
    exchange.visit.attempt.destination = Destination(place.host, place.port, None)
