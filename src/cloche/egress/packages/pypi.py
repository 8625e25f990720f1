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

from cloche.egress.packages.cache import Cache, Digest, url_key
from cloche.egress.packages.files import Reference
from cloche.egress.packages.replies import Made, Memory, NotThere, Seldom, Threads, UpstreamError
from cloche.egress.packages.upstream import PAGE_SECONDS, Answer, BadURL, Upstream, downgrades, join, origin
from cloche.structs import Struct

# A project's page of a simple index (PEP 503, 629, 658, 691, 700): read from HTML or JSON, written as either.

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "application/vnd.pypi.simple.v1+html"
ACCEPT = f"{JSON}, {HTML};q=0.2, text/html;q=0.1"
MAX_HTML_BYTES = 16 << 20  # it is slow to read
MAX_FILES = 100_000
MAX_TEXT = 4096

_PROJECT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,198}[A-Za-z0-9])?")
_FILENAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]{0,250}\.(whl|tar\.gz|zip|tar\.bz2|tar\.xz|tgz|egg)")
_HASHES = {"sha256": 64, "sha384": 96, "sha512": 128, "sha1": 40, "md5": 32, "sha224": 56}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")  # what uv cannot read spoils the whole page for it
# A whole tag of a link. No part of it can be matched in two ways, nor runs into the next tag, so that any page is read
# in a time that grows with its size only.
_TAG = re.compile(
    r"""<(?:a|base)\s(?:[^<>"']{1,2048}+|"(?:[^"<]|<(?![a-z/!])){0,4096}+"|'(?:[^'<]|<(?![a-z/!])){0,4096}+'){0,64}+>""",
    re.IGNORECASE,
)
_HEX = re.compile(r"[0-9a-f]+")


class BadPage(Exception):
    """The index answered with something that is no page of a simple index."""


class File(Struct):
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
    def digest(self) -> Digest | None:
        return _strongest(self.hashes)

    @property
    def metadata_digest(self) -> Digest | None:
        return _strongest(self.metadata or {})


class Project(Struct):
    name: str
    files: list[File]


def normalise(name: str) -> str | None:
    """As PEP 503 has it. None where it is no name of a project."""
    return re.sub(r"[-_.]+", "-", name).lower() if _PROJECT.fullmatch(name) else None


def _strongest(hashes: dict[str, str]) -> Digest | None:
    return next((Digest(name, hashes[name]) for name in _HASHES if name in hashes), None)


def read(name: str, body: bytes, content_type: str, url: str) -> Project:
    """What a page at `url` says. Whatever in it is no file that can be installed is left out. Raises BadPage."""
    found = _read_json(body) if "json" in content_type.lower() else _read_html(body)
    files: dict[str, File] = {}
    for entry in found:
        file = _file(entry, url)
        if file is not None:
            files.setdefault(file.name, file)  # by its name, and no two have one
    return Project(name=name, files=list(files.values()))


def _file(entry: dict[str, Any], base: str) -> File | None:
    name = entry.get("filename") or unquote(entry["url"].partition("?")[0].rpartition("/")[2])
    if not _FILENAME.fullmatch(name):
        return None
    try:
        url = join(base, entry["url"])
        if downgrades(base, url):
            return None
    except BadURL:
        return None
    metadata = entry.get("metadata")
    return File(
        name=name,
        url=url,
        hashes=_hashes(entry.get("hashes")),
        requires_python=_text(entry.get("requires_python")) or "",
        yanked=_yanked(entry.get("yanked")),
        metadata=_hashes(metadata) if metadata or isinstance(metadata, dict) else None,
        size=_size(entry.get("size")),
        upload_time=_time(entry.get("upload_time")),
    )


def _hashes(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    lower = {name: digest.lower() for name, digest in value.items() if isinstance(digest, str)}
    return {name: each for name, each in lower.items() if len(each) == _HASHES.get(name) and _HEX.fullmatch(each)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= MAX_TEXT else None


def _time(value: object) -> str:
    return value if isinstance(value, str) and _TIME.fullmatch(value) else ""


def _yanked(value: object) -> str | None:
    return "" if value is True else None if value is False else _text(value)


def _size(value: object) -> int | None:
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
        page = msgspec.json.decode(body, type=_JSONPage)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadPage("the index's page is not what PEP 691 says") from None
    found = []
    for file in page.files[:MAX_FILES]:
        entry = msgspec.structs.asdict(file)
        core, older = entry.pop("core_metadata"), entry.pop("dist_info_metadata")
        found.append({**entry, "metadata": older if core is None else core})
    return found


class _Links(HTMLParser):
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
        raise BadPage(f"the index's page is over {MAX_HTML_BYTES} bytes of HTML")
    parser = _Links()
    tags = _TAG.findall(_without_comments(body.decode("utf-8", "replace")))
    parser.feed("\n".join(tags[:MAX_FILES]))
    return [_link(attributes, parser.base or "") for attributes in parser.found if attributes.get("href")]


def _without_comments(text: str) -> str:
    parts, end = [], 0
    while (start := text.find("<!--", end)) >= 0:
        parts.append(text[end:start])
        end = text.find("-->", start)
        if end < 0:
            return "".join(parts)
        end += len("-->")
    return "".join((*parts, text[end:]))


def _link(attributes: dict[str, str | None], base: str) -> dict[str, Any]:
    href, _, fragment = (attributes["href"] or "").partition("#")
    algorithm, _, digest = fragment.partition("=")
    metadata = attributes.get("data-core-metadata", attributes.get("data-dist-info-metadata"))
    return {
        "url": _joined(base, href),
        "hashes": {algorithm: digest},
        "requires_python": attributes.get("data-requires-python"),
        "yanked": (attributes["data-yanked"] or "") if "data-yanked" in attributes else None,
        "metadata": _metadata(metadata),
        "upload_time": attributes.get("data-upload-time"),
    }


def _joined(base: str, href: str) -> str:
    try:
        return join(base, href) if base else href
    except BadURL:
        return href


def _metadata(value: str | None) -> dict[str, str] | bool:
    algorithm, equals, digest = (value or "").partition("=")
    return {algorithm: digest} if equals else value == "true"


def wants_json(accept: str) -> bool:
    """Whether an Accept header puts JSON first. Who asks for anything gets HTML, as PEP 691 has it."""
    return _quality(accept, JSON, "application/vnd.pypi.simple.latest+json") > _quality(
        accept, HTML, "text/html", "*/*"
    )


def _quality(accept: str, *kinds: str) -> float:
    best = -1.0
    for part in accept.split(",")[:50]:
        kind, *parameters = (each.strip().lower() for each in part.split(";"))
        if kind in kinds:
            weights = [each[2:] for each in parameters if each.startswith("q=")]
            best = max(best, float(weights[0]) if weights and re.fullmatch(r"[01](\.\d{0,3})?", weights[0]) else 1.0)
    return best


def write_json(project: Project) -> bytes:
    files = [_json_file(project.name, file) for file in project.files]
    return msgspec.json.encode({"meta": {"api-version": "1.0"}, "name": project.name, "files": files})


def _json_file(project: str, file: File) -> dict[str, Any]:
    entry: dict[str, Any] = {"filename": file.name, "url": _path(project, file), "hashes": file.hashes}
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


def write_html(project: Project) -> bytes:
    links = "\n".join(_html_link(project.name, file) for file in project.files)
    head = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head><body>\n'
    return f"{head}{links}\n</body></html>\n".encode()


def _html_link(project: str, file: File) -> str:
    digest = file.digest
    fragment = f"#{digest.algorithm}={digest.hex}" if digest else ""
    attributes = {"href": _path(project, file) + fragment}
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


def _path(project: str, file: File) -> str:
    return f"/pypi/files/{project}/{quote(file.name)}"


# Pages of indexes: kept for a while, then asked for again, and served as they were where the index is down.

MAX_PAGE_BYTES = 64 << 20
MISSING_SECONDS = 60.0  # for which a page that was not there is not asked for again
MAX_MISSING = 10_000
PAGES_MEMORY_BYTES = 16 << 20  # of pages that are in memory, too

Convert = Callable[[bytes, str, str], bytes]
"""A page's body, its content type and its URL, as what is to be kept. Raises UpstreamError. It runs in a thread."""


class Page(Struct):
    url: str  # where it came from in the end
    body: bytes
    at: float  # when it was known to be so
    etag: str = ""
    modified: str = ""


class Pages:
    def __init__(self, cache: Cache, threads: Threads, fresh_seconds: float):
        self._threads = threads
        self._cache = cache
        self._fresh_seconds = fresh_seconds
        self._seldom = Seldom()
        self._memory: Memory[Page] = Memory(PAGES_MEMORY_BYTES)
        self._asked: dict[str, asyncio.Task[Page]] = {}
        self._missing: dict[str, float] = {}

    async def get(self, upstream: Upstream, url: str, accept: str, convert: Convert) -> Page:
        """Who asks for what somebody asks for already gets the same answer. Raises NotThere, UpstreamError."""
        key = url_key(f"{accept} {url}")
        if time.monotonic() - self._missing.get(key, -MISSING_SECONDS) < min(MISSING_SECONDS, self._fresh_seconds):
            raise NotThere("the index has no such thing")
        known = self._memory.get(key)
        if known is not None and self._is_fresh(known):
            return known
        if key not in self._asked:
            task = asyncio.get_running_loop().create_task(self._page(upstream, url, accept, convert, key))
            self._asked[key] = task
            task.add_done_callback(lambda task: self._forget(key, task))
        return await asyncio.shield(self._asked[key])

    def _is_fresh(self, page: Page) -> bool:
        return 0 <= time.time() - page.at < self._fresh_seconds

    def _forget(self, key: str, task: asyncio.Task[Page]) -> None:
        self._asked.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever asked has seen it, or has left

    async def _page(self, upstream: Upstream, url: str, accept: str, convert: Convert, key: str) -> Page:
        kept = await self._threads.run(self._read, key)
        if kept is not None and self._is_fresh(kept):
            self._memory.put(key, kept, len(kept.body))
            return kept
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                page = await self._ask(upstream, url, accept, convert, kept)
        except NotThere:
            self._remember_missing(key)
            raise
        except (UpstreamError, TimeoutError) as error:
            failure = error if isinstance(error, UpstreamError) else _took_too_long(url)
            if kept is None:
                raise failure from None
            self._say_down(url, kept, failure)
            return kept
        await self._threads.run(self._cache.write, key, msgspec.msgpack.encode(page))
        self._memory.put(key, page, len(page.body))
        return page

    async def _ask(self, upstream: Upstream, url: str, accept: str, convert: Convert, kept: Page | None) -> Page:
        async with upstream.get(url, _headers(accept, kept)) as answer:
            if answer.status == 304:
                if kept is None:
                    raise UpstreamError("the index answered 304 to who knows nothing")
                return msgspec.structs.replace(kept, at=time.time())
            body = await answer.whole(MAX_PAGE_BYTES)
            return await self._threads.run(_converted, answer, body, convert)

    def _say_down(self, url: str, kept: Page, failure: UpstreamError) -> None:
        age_seconds = int(time.time() - kept.at)
        reason = f"{failure}; its old pages are served"
        self._seldom.warn("packages.index_down", host=origin(url).host, reason=reason, age_seconds=age_seconds)

    def _read(self, key: str) -> Page | None:
        content = self._cache.read(key)
        try:
            return msgspec.msgpack.decode(content, type=Page) if content is not None else None
        except (msgspec.MsgspecError, ValueError):
            return None  # of another version of Cloche

    def _remember_missing(self, key: str) -> None:
        while len(self._missing) >= MAX_MISSING:
            self._missing.pop(next(iter(self._missing)))
        self._missing[key] = time.monotonic()

    async def aclose(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _converted(answer: Answer, body: bytes, convert: Convert) -> Page:
    return Page(
        url=answer.url,
        body=convert(body, answer.header("content-type"), answer.url),
        at=time.time(),
        etag=answer.header("etag")[:1000],
        modified=answer.header("last-modified")[:100],
    )


def _headers(accept: str, kept: Page | None) -> dict[str, str]:
    known = {} if kept is None else {"if-none-match": kept.etag, "if-modified-since": kept.modified}
    return {"accept": accept, "user-agent": "cloche", **{name: value for name, value in known.items() if value}}


def _took_too_long(url: str) -> UpstreamError:
    return UpstreamError(f"{origin(url).host} did not answer within {PAGE_SECONDS:g} s")


METADATA = ".metadata"
MEMORY_BYTES = 16 << 20  # of pages as we write them, and as much of their files
FILES_FACTOR = 4  # so many times a page's length its files take, or so

_DECODER = msgspec.json.Decoder(Project)


class PyPI:
    """`indexes` are asked in their order, and the first that has a project is the only one that counts for it.

    Were their files put together, whoever registers the name of a private project at a public index, with a higher
    version, would be installed in its place.
    """

    def __init__(self, indexes: tuple[str, ...], upstream: Upstream, pages: Pages, threads: Threads):
        self.indexes = indexes
        self.upstream = upstream
        self._pages = pages
        self._written: Made[Page, bytes] = Made(MEMORY_BYTES, threads)
        self._files: Made[Page, dict[str, File]] = Made(MEMORY_BYTES, threads)

    async def project(self, name: str, as_json: bool) -> tuple[str, bytes]:
        """Its page as we write it, of a normalised name, and the index that has it. Raises NotThere, UpstreamError."""
        index, page = await self._page(name)
        make = _as_json if as_json else _as_html
        return index, await self._written.of(page, (name, as_json), 2 * len(page.body), make)

    async def _page(self, name: str) -> tuple[str, Page]:
        """Raises NotThere, UpstreamError.

        An index that does not answer is not passed over: the next one could have another project of that name.
        """
        for index in self.indexes:
            try:
                return index, await self._pages.get(self.upstream, f"{index}{name}/", ACCEPT, _reader(name))
            except NotThere:
                continue
        raise NotThere("no package index of this host has it")

    async def file(self, project: str, filename: str) -> tuple[str, Reference]:
        """A file that the project's page names, or its metadata. Raises NotThere, UpstreamError."""
        index, page = await self._page(project)
        files = await self._files.of(page, project, FILES_FACTOR * len(page.body), _files)
        file = files.get(filename)
        if file is not None:
            return index, Reference(file.url, file.digest)
        file = files.get(filename.removesuffix(METADATA))
        if file is None or file.metadata is None:
            raise NotThere("the project's page names no such file")
        return index, Reference(_beside(file.url), file.metadata_digest)


def _as_json(page: Page) -> bytes:
    return write_json(_DECODER.decode(page.body))


def _as_html(page: Page) -> bytes:
    return write_html(_DECODER.decode(page.body))


def _files(page: Page) -> dict[str, File]:
    return {file.name: file for file in _DECODER.decode(page.body).files}


def _beside(url: str) -> str:
    path, question, query = url.partition("?")
    return path + METADATA + question + query


def _reader(name: str) -> Convert:
    def convert(body: bytes, content_type: str, url: str) -> bytes:
        try:
            return msgspec.json.encode(read(name, body, content_type, url))
        except BadPage as error:
            raise UpstreamError(str(error)) from None

    return convert
