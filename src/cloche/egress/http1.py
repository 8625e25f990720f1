"""A strict HTTP/1 parser for a proxy: text that two parsers understand differently can be smuggled between
them.

Ambiguous input is refused. Output is written anew from the parsed values, never copied.
"""

from __future__ import annotations

import asyncio
import re
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from cloche.egress.streams import EgressRefusal, buffered_bytes

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_CHUNK_LINE = 1024
MAX_TRAILERS = 100
CHUNK_BYTES = 64 << 10
CHUNKS_AT_ONCE = 256
# Each chunk is work, however small it is: no normal client sends so many at once, of fewer bytes on average.
MAX_SMALL_CHUNKS = 1000
SMALL_CHUNK_BYTES = 16

_TOKEN = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(;[\t\x20-\x7e]*)?\r\n")
# They are between a program and the proxy, and are not forwarded.
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer upgrade".split()
)


class BadRequest(EgressRefusal):
    """The input is not HTTP, or could be read in two ways."""

    status, socks_code = 400, 1


class BadAnswer(BadRequest):
    """A server's answer is not HTTP, or could be read in two ways."""

    status, socks_code = 502, 1
    verdict = "failed"


class HttpHead(NamedTuple):
    """The first line and the headers, names in lower case, in their order."""

    start: tuple[str, str, str]  # method, target, version; or version, status, reason
    headers: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each == name]

    def single_value(self, name: str) -> str | None:
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
        """The length of a request's body; None for chunks. Raises BadRequest where it can be read in two ways."""
        length = _declared_length(self, BadRequest)
        return 0 if length is UNTIL_CLOSED else length

    @property
    def answer_length(self) -> int | None:
        """The length of an answer's body, UNTIL_CLOSED where the connection's end is its end. Raises BadAnswer."""
        return _declared_length(self, BadAnswer)


UNTIL_CLOSED = -1


def _declared_length(head: HttpHead, bad: type[EgressRefusal]) -> int | None:
    codings, lengths = head.all("transfer-encoding"), head.all("content-length")
    if codings and (lengths or "HTTP/1.0" in head.start):
        raise bad("a body has either a length or chunks")
    if codings:
        if len(codings) > 1 or codings[0].lower() != "chunked":
            raise bad("the only transfer-encoding is chunked")
        return None
    if len(lengths) > 1:
        raise bad("a body has one length")
    if not lengths:
        return UNTIL_CLOSED
    if not re.fullmatch(r"[0-9]{1,15}", lengths[0], re.ASCII):
        raise bad("the content-length is no number")
    return int(lengths[0])


async def read_head(reader: StreamReader, first: bytes = b"") -> HttpHead | None:
    """A request's head. `first` are the bytes of its first line that were read already. None where nothing
    came.

    Raises BadRequest.
    """
    lines = await _read_lines(reader, first, BadRequest)
    if not lines:
        return None
    words = lines[0].split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise BadRequest("the first line is not METHOD TARGET VERSION")
    if words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest("the version is not HTTP/1.1")
    return HttpHead((words[0].decode(), words[1].decode(), words[2].decode()), _parse_headers(lines[1:], BadRequest))


async def read_answer(reader: StreamReader) -> HttpHead:
    """An answer's head. Raises BadAnswer."""
    lines = await _read_lines(reader, b"", BadAnswer)
    if not lines:
        raise BadAnswer("the server closed the connection before it answered")
    version, _, rest = lines[0].partition(b" ")
    status, _, reason = rest.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not re.fullmatch(rb"[1-5][0-9][0-9]", status):
        raise BadAnswer("the server did not answer with HTTP/1")
    if not _VALUE.fullmatch(reason):
        raise BadAnswer("the server's answer has bytes in its first line that are none of a text")
    return HttpHead((version.decode(), status.decode(), reason.decode("latin-1")), _parse_headers(lines[1:], BadAnswer))


async def _read_lines(reader: StreamReader, first: bytes, bad: type[EgressRefusal]) -> list[bytes]:
    """The lines of a head, without their ends, which must be CR LF: one that ends otherwise is refused as it comes.

    None where nothing came at all.
    """
    lines: list[bytes] = []
    left = MAX_HEAD_BYTES
    while (line := await _read_line(reader, first, bad)) != b"\r\n":
        if not line and not lines:
            return []
        left, first = left - len(line), b""
        if left < 0 or len(lines) > MAX_HEADERS:
            raise bad(f"a head can have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers")
        if not line.endswith(b"\r\n"):
            raise bad("a line of the head does not end with CR LF")
        lines.append(line[:-2])
    if not lines:
        raise bad("the head begins with an empty line")
    return lines


async def _read_line(reader: StreamReader, first: bytes, bad: type[EgressRefusal]) -> bytes:
    try:
        return first if first.endswith(b"\n") else first + await reader.readuntil(b"\n")
    except IncompleteReadError as error:
        return first + error.partial
    except LimitOverrunError:
        raise bad(f"a head can have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers") from None


def _parse_headers(lines: list[bytes], bad: type[EgressRefusal]) -> tuple[tuple[str, str], ...]:
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise bad("a header is not NAME: VALUE")
        headers.append((name.decode().lower(), value.decode("latin-1")))
    return tuple(headers)


def end_to_end_headers(head: HttpHead, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The headers that go on, without those between two hops and those that `Connection` names."""
    named = {each.strip().lower() for value in head.all("connection") for each in value.split(",")}
    dropped = HOP_BY_HOP | named | set(without)
    return [(name, value) for name, value in head.headers if name not in dropped]


def write_head(start: str, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [start, *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_body(
    reader: StreamReader, length: int | None, bad: type[EgressRefusal] = BadRequest
) -> AsyncIterator[bytes]:
    """A body of that length, or with None in chunks, which come without their frames.

    Raises `bad` where it breaks off, or its chunks can be read in two ways.
    """
    try:
        if length is None:
            async for part in _read_chunks(reader, bad):
                yield part
        else:
            async for part in _read_exactly(reader, length, bad):
                yield part
    except IncompleteReadError:
        raise bad("the body breaks off") from None
    except LimitOverrunError:
        raise bad("a line between the chunks of the body is too long") from None


async def _read_exactly(reader: StreamReader, length: int, bad: type[EgressRefusal]) -> AsyncIterator[bytes]:
    while length:
        part = await reader.read(min(length, CHUNK_BYTES))
        if not part:
            raise bad("the body is shorter than its length")
        length -= len(part)
        yield part


async def _read_chunks(reader: StreamReader, bad: type[EgressRefusal]) -> AsyncIterator[bytes]:
    """The body of chunks. Buffered chunks come as one, and other tasks have their turn before the next."""
    crumbs = _SmallChunkLimit(bad)
    while True:
        portion = _whole_chunks(buffered_bytes(reader))
        if portion.chunks:
            crumbs.count(portion)
            await reader.readexactly(portion.framed_bytes)
            yield portion.body
            await asyncio.sleep(0)
        elif length := await _chunk_length(reader, bad):
            async for part in _read_exactly(reader, length, bad):
                yield part
            if await reader.readexactly(2) != b"\r\n":
                raise bad("a chunk is longer than its length")
        else:
            break
    await _skip_trailers(reader, bad)


class _ChunkBatch(NamedTuple):
    body: bytes
    chunks: int
    framed_bytes: int


def _whole_chunks(raw: bytearray) -> _ChunkBatch:
    """The complete and valid chunks at the front of the buffer, without the last of a body, which is empty."""
    parts: list[bytes] = []
    at = 0
    while len(parts) < CHUNKS_AT_ONCE and at < CHUNK_BYTES and (match := _CHUNK.match(raw, at)):
        start = match.end()
        end = start + int(match[1], 16)
        if start == end or start - at > MAX_CHUNK_LINE or raw[end : end + 2] != b"\r\n":
            break
        parts.append(bytes(raw[start:end]))
        at = end + 2
    return _ChunkBatch(b"".join(parts), len(parts), at)


class _SmallChunkLimit:
    """Limits small chunks that arrive together. Chunks that arrive one at a time, as in a stream, can be of any
    size.
    """

    def __init__(self, bad: type[EgressRefusal]):
        self._bad = bad
        self._chunks = self._bytes = 0

    def count(self, portion: _ChunkBatch) -> None:
        if portion.chunks > 1:
            self._chunks += portion.chunks
            self._bytes += len(portion.body)
        if self._chunks > MAX_SMALL_CHUNKS and self._bytes < SMALL_CHUNK_BYTES * self._chunks:
            raise self._bad(
                f"the body is in more than {MAX_SMALL_CHUNKS} chunks of less than {SMALL_CHUNK_BYTES} bytes each"
            )


async def _chunk_length(reader: StreamReader, bad: type[EgressRefusal]) -> int:
    line = await reader.readuntil(b"\n")
    match = _CHUNK.fullmatch(line)
    if not match or len(line) > MAX_CHUNK_LINE:
        raise bad("a chunk has no length")
    return int(match[1], 16)


async def _skip_trailers(reader: StreamReader, bad: type[EgressRefusal]) -> None:
    """Drops trailers: the body before them was already passed on without them."""
    lines = []
    left = MAX_HEAD_BYTES
    while (line := await reader.readuntil(b"\n")) != b"\r\n":
        lines.append(line[:-2])
        left -= len(line)
        if not line.endswith(b"\r\n") or len(lines) > MAX_TRAILERS or left < 0:
            raise bad("after the last chunk come no trailers")
    _parse_headers(lines, bad)
