"""The package index at the door: requests of `pip`, `uv` and `npm`, one after another on a connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from weakref import WeakKeyDictionary

from cloche.config.sections import Network, Packages
from cloche.egress import http1
from cloche.egress.destination import Destination
from cloche.egress.door import Door
from cloche.egress.journal import Attempt
from cloche.egress.packages import simple
from cloche.egress.packages.allowance import Allowance, Exceeded, Names
from cloche.egress.packages.answers import Exchange, segments
from cloche.egress.packages.cache import Cache
from cloche.egress.packages.files import Files, Reference
from cloche.egress.packages.npm import ABBREVIATED, Npm, is_name
from cloche.egress.packages.pages import Pages
from cloche.egress.packages.problems import NotThere, UpstreamError
from cloche.egress.packages.pypi import PyPI
from cloche.egress.packages.reach import Reach
from cloche.egress.packages.sources import Sources, read_sources
from cloche.egress.packages.threads import Threads
from cloche.egress.packages.upstream import Upstream
from cloche.egress.packages.urls import origin
from cloche.egress.refusal import Verdict
from cloche.egress.resolver import Resolve
from cloche.egress.visit import Visit

IDLE_SECONDS = 60.0  # between two requests on one connection
TOO_MANY_PAUSE_SECONDS = 0.5  # before who asks too often hears so
TOO_MANY = 429


class Refused(Exception):
    """Its text says why, for the program; `reason` says so for the log, without what the program named."""

    def __init__(self, status: int, why: str, reason: str):
        super().__init__(why)
        self.status = status
        self.reason = reason


class PackageIndex:
    """One for all sandboxes of this process. Whoever makes it closes it."""

    def __init__(self, config: Packages, network: Network, resolve: Resolve, directory: Path):
        sources = read_sources(config)
        cache = Cache(directory, config.cache_bytes)
        self._config = config
        self._names = Names(config)
        self._threads = threads = Threads()
        self._pages = pages = Pages(cache, threads, config.index_seconds)
        self._files = Files(cache, threads, config.file_bytes, config.index_seconds)
        reach = Reach(resolve, sources.places, network.internal_ranges)
        pypi, npm = (_upstream(sources, reach, file) for file in (sources.pypi_ca_file, sources.npm_ca_file))
        self._pypi = PyPI(sources.pypi, pypi, pages, threads)
        self._npm = Npm(sources.npm, sources.npm_scopes, npm, pages, threads)
        self._allowances: WeakKeyDictionary[Door, Allowance] = WeakKeyDictionary()

    @property
    def opened_files(self) -> dict[str, int]:
        """How many were in the cache, `hit`, and how many were not, `miss`."""
        return self._files.opened

    async def serve(self, visit: Visit, head: http1.Head) -> None:
        """That request, and those after it on the connection. Raises BadRequest."""
        allowance = self._allowances.setdefault(visit.door, Allowance(self._config))
        following: http1.Head | None = head
        while following is not None:
            visit.attempt.protocol = "package"
            exchange = Exchange(visit, following, allowance)
            await self._answer(exchange)
            if not exchange.keeps:
                return
            await asyncio.sleep(0)  # what was read ahead can be answered without ever waiting for anything
            following = await _following(visit)

    async def _answer(self, exchange: Exchange) -> None:
        """Writes the answer, and the line in the log."""
        attempt = exchange.visit.attempt
        try:
            exchange.allowance.ask()
            async with exchange.allowance.requests:
                await self._route(exchange)
            attempt.end("allowed")
        except Refused as refused:
            await _refuse(exchange, refused.status, str(refused), "denied", refused.reason)
        except Exceeded as exceeded:
            await _refuse(exchange, exceeded.status, str(exceeded), "denied", str(exceeded))
        except NotThere as error:
            await _refuse(exchange, 404, str(error), "failed", str(error))
        except UpstreamError as error:
            await _refuse(exchange, 502, str(error), "failed", str(error))

    async def _route(self, exchange: Exchange) -> None:
        match segments(exchange.head.target):
            case ["npm", "-", *_]:  # audits, search, accounts: npm goes on without them
                raise Refused(404, "the package index has packages only", "not a package")
            case _ if exchange.head.method not in ("GET", "HEAD"):
                raise Refused(405, "the package index can only be read", "not a read")
            case _ if exchange.has_body:
                raise Refused(400, "a request to the package index has no body", "a body")
            case ["refused"]:
                await self._say_refused(exchange)
            case ["pypi", "simple", name]:
                await self._project(exchange, self._project_name(exchange, name))
            case ["pypi", "files", name, filename]:
                await self._pypi_file(exchange, self._project_name(exchange, name), filename)
            case ["npm", *scope, name, "-", filename] if len(scope) < 2:
                await self._tarball(exchange, self._package_name(exchange, [*scope, name]), filename)
            case ["npm", *words, version] if is_name("/".join(words)):
                await self._manifest(exchange, self._package_name(exchange, words), version)
            case ["npm", *words] if 0 < len(words) < 3:
                await self._packument(exchange, self._package_name(exchange, words))
            case _:
                raise Refused(
                    404, "there is nothing here: pip's index is /pypi/simple/, npm's is /npm/", "not a package"
                )

    async def _say_refused(self, exchange: Exchange) -> None:
        """Once: who asks when nothing was refused since gets 404."""
        why = exchange.allowance.last_refusal()
        if not why:
            await exchange.refuse(404, "nothing was refused")
            return
        await exchange.content("text/plain; charset=utf-8", f"Cloche: {why}\n".encode())

    async def _project(self, exchange: Exchange, name: str) -> None:
        async with exchange.allowance.pages:
            as_json = simple.wants_json(exchange.accept)
            index, body = await self._pypi.project(name, as_json)
            _name_host(exchange, index)
            await exchange.content(simple.JSON if as_json else "text/html; charset=utf-8", body)

    async def _pypi_file(self, exchange: Exchange, project: str, filename: str) -> None:
        index, reference = await self._pypi.file(project, filename)
        _name_host(exchange, index)
        await self._file(exchange, self._pypi.upstream, reference)

    async def _packument(self, exchange: Exchange, name: str) -> None:
        is_short = ABBREVIATED in exchange.accept
        async with exchange.allowance.pages:
            body = await self._npm.packument(name, abbreviated=is_short, base=exchange.base)
            await exchange.content(ABBREVIATED if is_short else "application/json", body)

    async def _manifest(self, exchange: Exchange, name: str, version: str) -> None:
        async with exchange.allowance.pages:
            body = await self._npm.manifest(name, version, base=exchange.base)
            await exchange.content("application/json", body)

    async def _tarball(self, exchange: Exchange, name: str, filename: str) -> None:
        await self._file(exchange, self._npm.upstream, await self._npm.tarball(name, filename))

    async def _file(self, exchange: Exchange, upstream: Upstream, reference: Reference) -> None:
        exchange.allowance.check(1)  # or nothing is begun
        async with self._files.open(upstream, reference) as body:
            await exchange.file(body, reference.key)

    def _project_name(self, exchange: Exchange, text: str) -> str:
        if not self._pypi.indexes:
            raise Refused(404, "this host has no index of Python packages", "there is no index")
        _name_host(exchange, self._pypi.indexes[0])
        name = simple.normalise(text)
        if name is None:
            raise Refused(404, f"{text[:100]!r} is not the name of a project", "not the name of a project")
        self._check_name(exchange, "pypi", name)
        return name

    def _package_name(self, exchange: Exchange, words: list[str]) -> str:
        name = "/".join(words)
        if not is_name(name):
            raise Refused(404, f"{name[:100]!r} is not the name of a package", "not the name of a package")
        _name_host(exchange, self._npm.registry_of(name))
        self._check_name(exchange, "npm", name)
        return name

    def _check_name(self, exchange: Exchange, kind: str, name: str) -> None:
        exchange.visit.attempt.package = f"{kind}:{name}"  # what an auditor wants to know
        if not self._names.allows(kind, name):
            raise Refused(
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


def _upstream(sources: Sources, reach: Reach, ca_file: str | None) -> Upstream:
    return Upstream(sources.keyring, reach, ca_file, sources.trusted_hosts)


async def _following(visit: Visit) -> http1.Head | None:
    """The next request, with a line of its own in the log. None where none comes. Raises BadRequest."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            head = await http1.read_head(visit.reader)
    except TimeoutError:
        return None
    except http1.BadRequest:
        visit.attempt = Attempt(visit.door.journal, "package")
        raise
    if head is None:
        return None
    visit.attempt = Attempt(visit.door.journal, "package")
    if not head.target.startswith("/"):
        raise http1.BadRequest("this connection is to the package index: use another one for other hosts")
    return head


async def _refuse(exchange: Exchange, status: int, why: str, verdict: Verdict, reason: str) -> None:
    """In words, or where the answer has begun already by breaking it off: a program must not take it for whole."""
    exchange.visit.attempt.end(verdict, reason)
    if exchange.has_begun:
        exchange.keeps = False
        exchange.visit.writer.transport.abort()
    elif status == TOO_MANY:
        await asyncio.sleep(TOO_MANY_PAUSE_SECONDS)  # its connection waits with it, and there are only so many
        await exchange.refuse(status, why, [("retry-after", "1")])  # installers do as they are told
    else:
        await exchange.refuse(status, why)


def _name_host(exchange: Exchange, index: str) -> None:
    place = origin(index)
    exchange.visit.attempt.asked = Destination(place.host, place.port, None)
