"""Projects and files of the simple indexes that this host uses."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from cloche.egress.packages.cache import FileDigest, PackageCache, url_key
from cloche.egress.packages.files import FileReference
from cloche.egress.packages.replies import (
    DerivedMemory,
    LruMemory,
    NotInIndex,
    PackageThreads,
    RareWarnings,
    UpstreamError,
)
from cloche.egress.packages.upstream import (
    PAGE_SECONDS,
    BadURL,
    IndexAnswer,
    IndexClient,
    gives_up_tls,
    join_url,
    url_origin,
)
from cloche.json_text import JsonBounds, check_json
from cloche.structs import Struct

# A project's page of a simple index (PEP 503, 629, 658, 691, 700): reads and writes HTML and JSON.

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
SIMPLE_HTML = "application/vnd.pypi.simple.v1+html"
ACCEPT_SIMPLE = f"{SIMPLE_JSON}, {SIMPLE_HTML};q=0.2, text/html;q=0.1"
MAX_HTML_BYTES = 16 << 20  # it is slow to read
MAX_PAGE_FILES = 100_000
_PAGE_BOUNDS = JsonBounds(values=1_000_000)  # the longest pages of PyPI have a third of that
MAX_TEXT_LENGTH = 4096

_PROJECT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,198}[A-Za-z0-9])?")
_FILENAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]{0,250}\.(whl|tar\.gz|zip|tar\.bz2|tar\.xz|tgz|egg)")
_HASHES = {"sha256": 64, "sha384": 96, "sha512": 128, "sha1": 40, "md5": 32, "sha224": 56}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")  # uv refuses a page with another one
# A whole tag of a link. No part of it can be matched in two ways, nor runs into the next tag, so that any page is read
# in a time that grows with its size only.
_TAG = re.compile(
    r"""<(?:a|base)\s(?:[^<>"']{1,2048}+|"(?:[^"<]|<(?![a-z/!])){0,4096}+"|'(?:[^'<]|<(?![a-z/!])){0,4096}+'){0,64}+>""",
    re.IGNORECASE,
)
_HEX = re.compile(r"[0-9a-f]+")


class BadIndexPage(Exception):
    """The index answered with something that is no page of a simple index."""


class IndexFile(Struct):
    """A file of a project, as its index names it."""

    name: str
    url: str
    hashes: dict[str, str] = {}
    requires_python: str = ""
    yanked: str | None = None  # the reason, which may be empty; None: it is not
    metadata: dict[str, str] | None = None  # hashes of its metadata; None: the index has none beside it
    size: int | None = None
    upload_time: str = ""

    @property
    def digest(self) -> FileDigest | None:
        return _strongest_digest(self.hashes)

    @property
    def metadata_digest(self) -> FileDigest | None:
        return _strongest_digest(self.metadata or {})


class IndexProject(Struct):
    name: str
    files: list[IndexFile]


def normalise_name(name: str) -> str | None:
    """The name in the normal form of PEP 503. None where it is no name of a project."""
    return re.sub(r"[-_.]+", "-", name).lower() if _PROJECT.fullmatch(name) else None


def _strongest_digest(hashes: dict[str, str]) -> FileDigest | None:
    return next((FileDigest(name, hashes[name]) for name in _HASHES if name in hashes), None)


def read_page(name: str, body: bytes, content_type: str, url: str) -> IndexProject:
    """The project that a page at `url` describes. Entries that are no installable file are left out. Raises
    BadIndexPage.
    """
    found = _read_json(body) if "json" in content_type.lower() else _read_html(body)
    files: dict[str, IndexFile] = {}
    for entry in found:
        file = _parse_file(entry, url)
        if file is not None:
            files.setdefault(file.name, file)  # by its name, and no two have one
    return IndexProject(name=name, files=list(files.values()))


def _parse_file(entry: dict[str, Any], base: str) -> IndexFile | None:
    name = entry.get("filename") or unquote(entry["url"].partition("?")[0].rpartition("/")[2])
    if not _FILENAME.fullmatch(name):
        return None
    try:
        url = join_url(base, entry["url"])
        if gives_up_tls(base, url):
            return None
    except BadURL:
        return None
    metadata = entry.get("metadata")
    return IndexFile(
        name=name,
        url=url,
        hashes=_valid_hashes(entry.get("hashes")),
        requires_python=_short_text(entry.get("requires_python")) or "",
        yanked=_yanked_reason(entry.get("yanked")),
        metadata=_valid_hashes(metadata) if metadata or isinstance(metadata, dict) else None,
        size=_valid_size(entry.get("size")),
        upload_time=_valid_time(entry.get("upload_time")),
    )


def _valid_hashes(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    lower = {name: digest.lower() for name, digest in value.items() if isinstance(digest, str)}
    return {name: each for name, each in lower.items() if len(each) == _HASHES.get(name) and _HEX.fullmatch(each)}


def _short_text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH else None


def _valid_time(value: object) -> str:
    return value if isinstance(value, str) and _TIME.fullmatch(value) else ""


def _yanked_reason(value: object) -> str | None:
    return "" if value is True else None if value is False else _short_text(value)


def _valid_size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class _JSONFile(Struct, rename={"core_metadata": "core-metadata", "dist_info_metadata": "dist-info-metadata",
                                "requires_python": "requires-python", "upload_time": "upload-time"}):  # fmt: skip
    filename: str
    url: str
    hashes: Any = None
    requires_python: Any = None
    core_metadata: Any = None
    dist_info_metadata: Any = None
    yanked: Any = None
    size: Any = None
    upload_time: Any = None


class _JSONPage(Struct):
    files: list[_JSONFile]


def _read_json(body: bytes) -> list[dict[str, Any]]:
    try:
        check_json(body, _PAGE_BOUNDS)
        page = msgspec.json.decode(body, type=_JSONPage)
    except (msgspec.MsgspecError, ValueError):
        raise BadIndexPage("the index's page does not conform to PEP 691") from None
    found = []
    for file in page.files[:MAX_PAGE_FILES]:
        entry = msgspec.structs.asdict(file)
        core, older = entry.pop("core_metadata"), entry.pop("dist_info_metadata")
        found.append({**entry, "metadata": older if core is None else core})
    return found


class _LinkParser(HTMLParser):
    """Takes tags apart. It is given those that `_TAG` found: with other things it can be kept busy for hours."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[dict[str, str | None]] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))
        elif tag == "base" and self.base is None:
            self.base = dict(attrs).get("href")


def _read_html(body: bytes) -> list[dict[str, Any]]:
    if len(body) > MAX_HTML_BYTES:
        raise BadIndexPage(f"the index's page is over {MAX_HTML_BYTES} bytes of HTML")
    parser = _LinkParser()
    tags = _TAG.findall(_without_comments(body.decode("utf-8", "replace")))
    parser.feed("\n".join(tags[:MAX_PAGE_FILES]))
    return [_link_entry(attributes, parser.base or "") for attributes in parser.found if attributes.get("href")]


def _without_comments(text: str) -> str:
    parts, end = [], 0
    while (start := text.find("<!--", end)) >= 0:
        parts.append(text[end:start])
        end = text.find("-->", start)
        if end < 0:
            return "".join(parts)
        end += len("-->")
    return "".join((*parts, text[end:]))


def _link_entry(attributes: dict[str, str | None], base: str) -> dict[str, Any]:
    href, _, fragment = (attributes["href"] or "").partition("#")
    algorithm, _, digest = fragment.partition("=")
    metadata = attributes.get("data-core-metadata", attributes.get("data-dist-info-metadata"))
    return {
        "url": _resolve_link(base, href),
        "hashes": {algorithm: digest},
        "requires_python": attributes.get("data-requires-python"),
        "yanked": (attributes["data-yanked"] or "") if "data-yanked" in attributes else None,
        "metadata": _link_metadata(metadata),
        "upload_time": attributes.get("data-upload-time"),
    }


def _resolve_link(base: str, href: str) -> str:
    try:
        return join_url(base, href) if base else href
    except BadURL:
        return href


def _link_metadata(value: str | None) -> dict[str, str] | bool:
    algorithm, equals, digest = (value or "").partition("=")
    return {algorithm: digest} if equals else value == "true"


def wants_json(accept: str) -> bool:
    """Whether an Accept header prefers JSON. A client that accepts anything gets HTML, as in PEP 691."""
    return _accept_quality(accept, SIMPLE_JSON, "application/vnd.pypi.simple.latest+json") > _accept_quality(
        accept, SIMPLE_HTML, "text/html", "*/*"
    )


def _accept_quality(accept: str, *kinds: str) -> float:
    best = -1.0
    for part in accept.split(",")[:50]:
        kind, *parameters = (each.strip().lower() for each in part.split(";"))
        if kind in kinds:
            weights = [each[2:] for each in parameters if each.startswith("q=")]
            best = max(best, float(weights[0]) if weights and re.fullmatch(r"[01](\.\d{0,3})?", weights[0]) else 1.0)
    return best


def write_json(project: IndexProject) -> bytes:
    files = [_json_file(project.name, file) for file in project.files]
    return msgspec.json.encode({"meta": {"api-version": "1.0"}, "name": project.name, "files": files})


def _json_file(project: str, file: IndexFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"filename": file.name, "url": _file_path(project, file), "hashes": file.hashes}
    if file.requires_python:
        entry["requires-python"] = file.requires_python
    if file.metadata is not None:
        entry["core-metadata"] = entry["dist-info-metadata"] = file.metadata or True
    if file.yanked is not None:
        entry["yanked"] = file.yanked or True
    if file.size is not None:
        entry["size"] = file.size
    if file.upload_time:
        entry["upload-time"] = file.upload_time
    return entry


def write_html(project: IndexProject) -> bytes:
    links = "\n".join(_html_link(project.name, file) for file in project.files)
    head = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head><body>\n'
    return f"{head}{links}\n</body></html>\n".encode()


def _html_link(project: str, file: IndexFile) -> str:
    digest = file.digest
    fragment = f"#{digest.algorithm}={digest.hex}" if digest else ""
    attributes = {"href": _file_path(project, file) + fragment}
    if file.requires_python:
        attributes["data-requires-python"] = file.requires_python
    if file.metadata is not None:
        known = file.metadata_digest
        said = f"{known.algorithm}={known.hex}" if known else "true"
        attributes["data-core-metadata"] = attributes["data-dist-info-metadata"] = said
    if file.yanked is not None:
        attributes["data-yanked"] = file.yanked
    written = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<a {written}>{html.escape(file.name)}</a><br>"


def _file_path(project: str, file: IndexFile) -> str:
    return f"/pypi/files/{project}/{quote(file.name)}"


# Pages of indexes: cached for a while, then requested again; the old page is served where the index is
# down.

MAX_PAGE_BYTES = 64 << 20
MISSING_SECONDS = 60.0  # for which a missing page is not requested again
MAX_MISSING = 10_000
PAGES_MEMORY_BYTES = 16 << 20  # of pages that are in memory, too

ConvertPage = Callable[[bytes, str, str], bytes]
"""A page's body, its content type and its URL, as what is to be kept. Raises UpstreamError. It runs in a thread."""


class IndexPage(Struct):
    url: str  # where it came from in the end
    body: bytes
    at: float  # when it was known to be so
    etag: str = ""
    modified: str = ""


class IndexPages:
    def __init__(self, cache: PackageCache, threads: PackageThreads, fresh_seconds: float):
        self._threads = threads
        self._cache = cache
        self._fresh_seconds = fresh_seconds
        self._seldom = RareWarnings()
        self._memory: LruMemory[IndexPage] = LruMemory(PAGES_MEMORY_BYTES)
        self._page_tasks: dict[str, asyncio.Task[IndexPage]] = {}
        self._missing: dict[str, float] = {}

    async def get(self, upstream: IndexClient, url: str, accept: str, convert: ConvertPage) -> IndexPage:
        """The page. Concurrent requests for one page share one answer. Raises NotInIndex, UpstreamError."""
        key = url_key(f"{accept} {url}")
        if time.monotonic() - self._missing.get(key, -MISSING_SECONDS) < min(MISSING_SECONDS, self._fresh_seconds):
            raise NotInIndex("the index has no such thing")
        known = self._memory.get(key)
        if known is not None and self._is_fresh(known):
            return known
        if key not in self._page_tasks:
            task = asyncio.get_running_loop().create_task(self._load_page(upstream, url, accept, convert, key))
            self._page_tasks[key] = task
            task.add_done_callback(lambda task: self._forget_request(key, task))
        return await asyncio.shield(self._page_tasks[key])

    def _is_fresh(self, page: IndexPage) -> bool:
        return 0 <= time.time() - page.at < self._fresh_seconds

    def _forget_request(self, key: str, task: asyncio.Task[IndexPage]) -> None:
        self._page_tasks.pop(key, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller has seen it, or has left

    async def _load_page(
        self, upstream: IndexClient, url: str, accept: str, convert: ConvertPage, key: str
    ) -> IndexPage:
        kept = await self._threads.run(self._read_cached, key)
        if kept is not None and self._is_fresh(kept):
            self._memory.put(key, kept, len(kept.body))
            return kept
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                page = await self._request_page(upstream, url, accept, convert, kept)
        except NotInIndex:
            self._remember_missing(key)
            raise
        except (UpstreamError, TimeoutError) as error:
            failure = error if isinstance(error, UpstreamError) else _page_timeout(url)
            if kept is None:
                raise failure from None
            self._log_index_down(url, kept, failure)
            return kept
        await self._threads.run(self._cache.write, key, msgspec.msgpack.encode(page))
        self._memory.put(key, page, len(page.body))
        return page

    async def _request_page(
        self, upstream: IndexClient, url: str, accept: str, convert: ConvertPage, kept: IndexPage | None
    ) -> IndexPage:
        async with upstream.get(url, _request_headers(accept, kept)) as answer:
            if answer.status == 304:
                if kept is None:
                    raise UpstreamError("the index answered 304 to an unconditional request")
                return msgspec.structs.replace(kept, at=time.time())
            body = await answer.whole(MAX_PAGE_BYTES)
            return await self._threads.run(_convert_page, answer, body, convert)

    def _log_index_down(self, url: str, kept: IndexPage, failure: UpstreamError) -> None:
        age_seconds = int(time.time() - kept.at)
        reason = f"{failure}; its old pages are served"
        self._seldom.warn_rarely(
            "packages.index_down", host=url_origin(url).host, reason=reason, age_seconds=age_seconds
        )

    def _read_cached(self, key: str) -> IndexPage | None:
        content = self._cache.read(key)
        try:
            return msgspec.msgpack.decode(content, type=IndexPage) if content is not None else None
        except (msgspec.MsgspecError, ValueError):
            return None  # of another version of Cloche

    def _remember_missing(self, key: str) -> None:
        while len(self._missing) >= MAX_MISSING:
            self._missing.pop(next(iter(self._missing)))
        self._missing[key] = time.monotonic()

    async def aclose(self) -> None:
        tasks = list(self._page_tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _convert_page(answer: IndexAnswer, body: bytes, convert: ConvertPage) -> IndexPage:
    return IndexPage(
        url=answer.url,
        body=convert(body, answer.header("content-type"), answer.url),
        at=time.time(),
        etag=answer.header("etag")[:1000],
        modified=answer.header("last-modified")[:100],
    )


def _request_headers(accept: str, kept: IndexPage | None) -> dict[str, str]:
    known = {} if kept is None else {"if-none-match": kept.etag, "if-modified-since": kept.modified}
    return {"accept": accept, "user-agent": "cloche", **{name: value for name, value in known.items() if value}}


def _page_timeout(url: str) -> UpstreamError:
    return UpstreamError(f"{url_origin(url).host} did not answer within {PAGE_SECONDS:g} s")


METADATA_SUFFIX = ".metadata"
PYPI_MEMORY_BYTES = 16 << 20  # of rendered pages, and as much of their files
FILES_FACTOR = 4  # approximate memory of the files, as a multiple of the page's length

_DECODER = msgspec.json.Decoder(IndexProject)


class PypiIndexes:
    """The configured simple indexes. The first one in order that has a project is the only one that counts for
    it.

    Were their files put together, a stranger could register the name of a private project at a public index, with
    a higher version, and would be installed in its place.
    """

    def __init__(self, indexes: tuple[str, ...], upstream: IndexClient, pages: IndexPages, threads: PackageThreads):
        self.indexes = indexes
        self.upstream = upstream
        self._pages = pages
        self._written: DerivedMemory[IndexPage, bytes] = DerivedMemory(PYPI_MEMORY_BYTES, threads)
        self._files: DerivedMemory[IndexPage, dict[str, IndexFile]] = DerivedMemory(PYPI_MEMORY_BYTES, threads)

    async def project_page(self, name: str, as_json: bool) -> tuple[str, bytes]:
        """Its page as we write it, of a normalised name, and the index that has it. Raises NotInIndex,
        UpstreamError.
        """
        index, page = await self._find_page(name)
        make = _page_as_json if as_json else _page_as_html
        return index, await self._written.of(page, (name, as_json), 2 * len(page.body), make)

    async def _find_page(self, name: str) -> tuple[str, IndexPage]:
        """Raises NotInIndex, UpstreamError.

        An index that does not answer is not passed over: the next one could have another project of that name.
        """
        for index in self.indexes:
            try:
                return index, await self._pages.get(
                    self.upstream, f"{index}{name}/", ACCEPT_SIMPLE, _page_converter(name)
                )
            except NotInIndex:
                continue
        raise NotInIndex("no package index of this host has it")

    async def file(self, project: str, filename: str) -> tuple[str, FileReference]:
        """A file that the project's page names, or its metadata. Raises NotInIndex, UpstreamError."""
        index, page = await self._find_page(project)
        files = await self._files.of(page, project, FILES_FACTOR * len(page.body), _page_files)
        file = files.get(filename)
        if file is not None:
            return index, FileReference(file.url, file.digest)
        file = files.get(filename.removesuffix(METADATA_SUFFIX))
        if file is None or file.metadata is None:
            raise NotInIndex("the project's page names no such file")
        return index, FileReference(_metadata_url(file.url), file.metadata_digest)


def _page_as_json(page: IndexPage) -> bytes:
    return write_json(_DECODER.decode(page.body))


def _page_as_html(page: IndexPage) -> bytes:
    return write_html(_DECODER.decode(page.body))


def _page_files(page: IndexPage) -> dict[str, IndexFile]:
    return {file.name: file for file in _DECODER.decode(page.body).files}


def _metadata_url(url: str) -> str:
    path, question, query = url.partition("?")
    return path + METADATA_SUFFIX + question + query


def _page_converter(name: str) -> ConvertPage:
    def convert(body: bytes, content_type: str, url: str) -> bytes:
        try:
            return msgspec.json.encode(read_page(name, body, content_type, url))
        except BadIndexPage as error:
            raise UpstreamError(str(error)) from None

    return convert
