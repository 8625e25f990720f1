"""One request of a program to the package index, and what it is answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from cloche.egress import http1
from cloche.egress.packages.allowance import Allowance, Exceeded
from cloche.egress.packages.files import CHUNK_BYTES, Body
from cloche.egress.visit import Visit

MAX_SEGMENTS = 8
REASONS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 403: "Denied by package policy", 404: "Not Found",
           405: "Method Not Allowed", 408: "Request Timeout", 416: "Range Not Satisfiable", 429: "Too Many Requests",
           502: "Bad Gateway"}  # fmt: skip

DENIED = 403
REMEMBERED = frozenset({DENIED, 429, 502})  # pip and uv do not show what is said with them

_SEGMENT = re.compile(rb"[\x20-\x7e]{1,300}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9a-fA-F:]{2,45}\](:[0-9]{1,5})?")
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


class Span(NamedTuple):
    start: int
    stop: int


def segments(target: str) -> list[str] | None:
    """Of a path, each decoded once: a slash in one does not make two of it. None where it is no path of ours."""
    parts = [unquote_to_bytes(part) for part in target.partition("?")[0].split("/")[1:]]
    if parts and parts[-1] == b"":
        parts.pop()
    if len(parts) > MAX_SEGMENTS or not all(_SEGMENT.fullmatch(part) and part not in (b".", b"..") for part in parts):
        return None
    return [part.decode() for part in parts]


class Exchange:
    """`keeps` says whether the connection can have another request after it: none after one that was refused.

    Raises BadRequest where its body's length can be read in two ways. No body is ever read: it ends the connection.
    """

    def __init__(self, visit: Visit, head: http1.Head, allowance: Allowance):
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
        host = self.head.one("host") or ""
        if not _HOST.fullmatch(host):
            raise http1.BadRequest("the header host names none")
        return f"http://{host}"

    async def refuse(self, status: int, why: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        """A few words, which are on the house, and the end of the connection."""
        if status in REMEMBERED and self.head.target.startswith("/pypi/"):
            self.allowance.note_refusal(why)
        kind, body = self._said(why)
        self._begin(status, len(body), [("content-type", kind), *headers])
        if self.head.method != "HEAD":
            self.visit.writer.write(body)
            await self._drain()

    def _said(self, why: str) -> tuple[str, bytes]:
        """As npm shows it, and as people read it."""
        if self.head.target.startswith("/npm/"):
            return "application/json", msgspec.json.encode({"error": f"Cloche: {why}"})
        return "text/plain; charset=utf-8", f"Cloche: {why}\n".encode()

    async def content(self, content_type: str, body: bytes) -> None:
        """Raises Exceeded."""
        headers = [("content-type", content_type), ("cache-control", "no-cache"), ("vary", "accept")]
        self.allowance.check(len(body))
        self._begin(200, len(body), headers)
        if self.head.method != "HEAD":
            self.allowance.take(len(body))
            view = memoryview(body)
            for start in range(0, len(body), CHUNK_BYTES):
                await self._send(view[start : start + CHUNK_BYTES])

    async def file(self, body: Body, tag: str) -> None:
        """Or the part of it that was asked for. Not to be kept inside: the host has it.

        Raises Exceeded, UpstreamError.
        """
        headers = [("content-type", "application/octet-stream"), ("cache-control", "no-store"), ("etag", f'"{tag}"')]
        span = self._span(body, tag)
        if span is None:
            self._begin(416, 0, [("content-range", f"bytes */{body.size}")])
            return
        if body.has_ranges:
            headers.append(("accept-ranges", "bytes"))
        is_part = span != (0, body.size)
        if is_part:
            headers.append(("content-range", f"bytes {span.start}-{span.stop - 1}/{body.size}"))
        await self._send_file(body, span, 206 if is_part else 200, headers)

    async def _send_file(self, body: Body, span: Span, status: int, headers: list[tuple[str, str]]) -> None:
        # The host fetches all of it now, and makes room for it: who leaves before its end has paid for that, too, and
        # who asked for its head only.
        is_head = self.head.method == "HEAD"
        paid_bytes = body.size if not body.is_here else 0 if is_head else span.stop - span.start
        self.allowance.take(paid_bytes)
        if is_head:
            self._begin(status, span.stop - span.start, headers)
            return
        async for part in body.parts(*span):
            if not self.has_begun:  # only now: before its first bytes were checked there may be an error to tell
                self._begin(status, span.stop - span.start, headers)
            await self._send(part)
        if not self.has_begun:
            self._begin(status, 0, headers)

    def _span(self, body: Body, tag: str) -> Span | None:
        """None where there is no such part."""
        whole = Span(0, body.size)
        match = _RANGE.fullmatch(self.head.one("range") or "")
        only_if = self.head.one("if-range")
        if match is None or not body.has_ranges or only_if not in (None, f'"{tag}"'):
            return whole
        first, last = match[1], match[2]
        if not first:
            return Span(max(0, body.size - int(last)), body.size) if last and int(last) and body.size else None
        stop = min(int(last) + 1, body.size) if last else body.size
        return Span(int(first), stop) if int(first) < stop else None

    def _begin(self, status: int, length: int, headers: Iterable[tuple[str, str]]) -> None:
        self.has_begun = True
        if status >= 400:  # or a program could ask for what it does not get as fast as it can write
            self.keeps = False
        self.visit.attempt.let_through = status < 300
        said = [*headers, ("content-length", str(length)), ("connection", "keep-alive" if self.keeps else "close")]
        package = self.visit.attempt.package if status == DENIED else ""
        phrase = REASONS[status] + (f": {package}" if package else "")
        self.visit.writer.write(http1.write_head(f"HTTP/1.1 {status} {phrase}", said))

    async def _send(self, part: bytes | memoryview) -> None:
        """Raises Exceeded."""
        self.visit.attempt.received_bytes += len(part)
        self.visit.writer.write(part)
        await self._drain()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.visit.door.config.idle_seconds):
                await self.visit.writer.drain()
        except TimeoutError:
            raise Exceeded("the program does not read what it asked for", 408) from None
