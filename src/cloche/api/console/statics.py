"""The console's own files: scripts, styles, fonts, and vendored libraries.

They need no login: they are the same on every server. Their addresses have a version, so that a browser
caches them forever; a page in an opaque origin (`/ui/frame`) may use them, too.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors

STATIC_DIRECTORY = Path(__file__).parent / "static"
STATIC_PREFIX = "/ui/static/"
CACHE_FOREVER = "public, max-age=31536000, immutable"
CONTENT_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".html": "text/html; charset=utf-8",
}
MAX_NAME = 200  # characters: more than a file system takes raises what is no answer
NO_FILE = "there is no such file of the console"
COMPRESSED_TYPES = frozenset({".png", ".woff2", ".ico"})  # compressed as they are


class ConsoleStatic(NamedTuple):
    """A file as it is sent."""

    tag: str
    plain: bytes
    packed: bytes | None


class ConsoleStatics:
    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], ConsoleStatic] = {}  # by name and time of change: those that there are
        self.version = ""

    async def ready(self) -> None:
        """Computes the version. To be awaited before anything else."""
        if not self.version:
            self.version = await asyncio.to_thread(_files_version)

    def url(self, name: str) -> str:
        """The address of that file."""
        return f"{STATIC_PREFIX}v-{self.version}/{name}"

    async def answer(self, request: Request) -> Response:
        """Raises NotFound."""
        name = request.scope["path"].removeprefix(STATIC_PREFIX)
        asked, _, rest = name.partition("/")
        versioned = asked.startswith("v-")
        path = _find_file(rest if versioned else name)
        kept = await self._load_file(path)
        current = versioned and asked == f"v-{self.version}"
        headers = {
            "cache-control": CACHE_FOREVER if current else "no-cache",
            "etag": kept.tag,
            "vary": "accept-encoding",
            "access-control-allow-origin": "*",  # fonts and modules of an opaque origin
            "cross-origin-resource-policy": "cross-origin",
        }
        if request.headers.get("if-none-match") == kept.tag:
            return Response(status_code=304, headers=headers)
        body = kept.plain
        if kept.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = kept.packed, "gzip"
        return Response(body, headers={**headers, "content-type": CONTENT_TYPES[path.suffix]})

    async def _load_file(self, path: Path) -> ConsoleStatic:
        key = str(path), path.stat().st_mtime_ns
        if key not in self._kept:
            self._kept[key] = await asyncio.to_thread(_read_static, path)
        return self._kept[key]


def _files_version() -> str:
    """A hash that changes with any file. It reads them all: 7 MB."""
    digest = hashlib.sha256()
    for path in sorted(STATIC_DIRECTORY.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(STATIC_DIRECTORY)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _find_file(name: str) -> Path:
    path = STATIC_DIRECTORY / name
    if (
        len(name) > MAX_NAME
        or "\0" in name
        or path.suffix not in CONTENT_TYPES
        or not path.resolve().is_relative_to(STATIC_DIRECTORY)
    ):
        raise errors.NotFound(NO_FILE)
    if not path.is_file():
        raise errors.NotFound(NO_FILE)
    return path


def _read_static(path: Path) -> ConsoleStatic:
    plain = path.read_bytes()
    packed = None if path.suffix in COMPRESSED_TYPES else gzip.compress(plain, 9, mtime=0)
    return ConsoleStatic(f'"{hashlib.sha256(plain).hexdigest()[:20]}"', plain, packed)
