"""HTTP/1 as a proxy must read it: strictly, since what two parsers understand differently can be smuggled between them.

Whatever is ambiguous is refused. What is sent on is written anew from what was understood, never copied.
"""

from __future__ import annotations

import re
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_CHUNK_LINE = 1024
CHUNK_BYTES = 64 << 10

_TOKEN = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(;[\t\x20-\x7e]*)?\r\n")
# They are between a program and the proxy, and not for whoever it leads to.
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer upgrade".split()
)


class BadRequest(Exception):
    """What came is not HTTP, or could be read in two ways."""


class Head(NamedTuple):
    """The first line and the headers, names in lower case, in their order."""

    start: tuple[str, str, str]  # method, target, version; or version, status, reason
    headers: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each == name]

    def one(self, name: str) -> str | None:
        """Raises BadRequest where it is there twice."""
        found = self.all(name)
        if len(found) > 1:
            raise BadRequest(f"the header {name} is there {len(found)} times")
        return found[0] if found else None

    @property
    def method(self) -> str:
        return self.start[0]

    @property
    def target(self) -> str:
        return self.start[1]

    @property
    def status(self) -> int:
        return int(self.start[1])

    @property
    def body_length(self) -> int | None:
        """Of a request's body; None for one in chunks. Raises BadRequest where that can be read in two ways."""
        codings, length = self.all("transfer-encoding"), self.one("content-length")
        if codings and length is not None:
            raise BadRequest("a body has either a length or chunks")
        if codings:
            if len(codings) > 1 or codings[0].lower() != "chunked":
                raise BadRequest("the only transfer-encoding is chunked")
            return None
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) < 16):
            raise BadRequest("the content-length is no number")
        return int(length or 0)


async def read_head(reader: StreamReader, first: bytes = b"") -> Head | None:
    """A request's head; `first` is what was read of it already. None where nothing came. Raises BadRequest."""
    try:
        raw = first + await reader.readuntil(b"\r\n\r\n")
    except IncompleteReadError as error:
        if not first + error.partial:
            return None
        raise BadRequest("the request ends in the middle of its head") from None
    except LimitOverrunError:
        raise BadRequest(f"the head of a request can have {MAX_HEAD_BYTES} bytes") from None
    start, *lines = raw[:-4].split(b"\r\n")
    words = start.split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise BadRequest("the first line is not METHOD TARGET VERSION")
    if words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest("the version is not HTTP/1.1")
    return Head((words[0].decode(), words[1].decode(), words[2].decode()), _headers(lines))


async def read_answer(reader: StreamReader) -> Head:
    """An answer's head. Raises BadRequest."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except IncompleteReadError:
        raise BadRequest("the server closed the connection before it answered") from None
    except LimitOverrunError:
        raise BadRequest("the server's answer has too many headers") from None
    start, *lines = raw[:-4].split(b"\r\n")
    version, _, rest = start.partition(b" ")
    status, _, reason = rest.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not re.fullmatch(rb"[1-5][0-9][0-9]", status):
        raise BadRequest("the server did not answer with HTTP/1")
    if not _VALUE.fullmatch(reason):
        raise BadRequest("the server's answer has bytes in its first line that are none of a text")
    return Head((version.decode(), status.decode(), reason.decode("latin-1")), _headers(lines))


def _headers(lines: list[bytes]) -> tuple[tuple[str, str], ...]:
    if len(lines) > MAX_HEADERS:
        raise BadRequest(f"there can be {MAX_HEADERS} headers")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadRequest("a header is not NAME: VALUE")
        headers.append((name.decode().lower(), value.decode("latin-1")))
    return tuple(headers)


def end_to_end(head: Head, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The headers that go on, without those between two hops and those that `Connection` names."""
    named = {each.strip().lower() for value in head.all("connection") for each in value.split(",")}
    dropped = HOP_BY_HOP | named | set(without)
    return [(name, value) for name, value in head.headers if name not in dropped]


def write_head(start: str, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [start, *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_body(reader: StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """A body of that length, or in chunks, which come without their frames. Raises BadRequest where it breaks off."""
    try:
        if length is None:
            async for part in _chunks(reader):
                yield part
            return
        while length:
            part = await reader.read(min(length, CHUNK_BYTES))
            if not part:
                raise BadRequest("the body is shorter than its length")
            length -= len(part)
            yield part
    except (IncompleteReadError, LimitOverrunError):
        raise BadRequest("the body breaks off") from None


async def _chunks(reader: StreamReader) -> AsyncIterator[bytes]:
    while True:
        match = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
        if not match:
            raise BadRequest("a chunk has no length")
        left = int(match[1], 16)
        if left == 0:
            break
        while left:
            part = await reader.read(min(left, CHUNK_BYTES))
            if not part:
                raise BadRequest("a chunk is shorter than its length")
            left -= len(part)
            yield part
        if await reader.readexactly(2) != b"\r\n":
            raise BadRequest("a chunk is longer than its length")
    while (await reader.readuntil(b"\r\n")) != b"\r\n":
        pass  # trailers are not passed on
