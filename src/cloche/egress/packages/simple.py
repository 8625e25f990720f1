"""A project's page of a simple index (PEP 503, 629, 658, 691, 700): read from HTML or JSON, written as either."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from cloche.egress.packages.cache import Digest
from cloche.egress.packages.urls import BadURL, downgrades, join
from cloche.structs import Struct

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
