"""A streaming parser for forms with files (multipart/form-data): holds only the current chunk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from cloche import errors

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it would log bytes of what clients send

MULTIPART_TYPE = "multipart/form-data"
MAX_FIELD_BYTES = 4096  # of a field that is not a file
MAX_PARTS_AT_ONCE = 16  # in a chunk that is parsed as one
CROWDED_STEP_BYTES = 8192  # of another chunk
_PARAMETER = re.compile(r';\s*([^\s=;]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)')
_ESCAPED = re.compile(r'\\([][()<>@,;:\\"/?=])')  # as Go reads it: other backslashes are of paths of Windows
_CUT_OFF = "the form ended before its closing boundary: send it again, whole"


class FieldTooLong(errors.InvalidRequest):
    """The value of a form's field is over the limit."""


class FormPart(NamedTuple):
    """One field of a form. `chunks` must be read before the next part is requested; unread chunks are skipped."""

    name: str
    filename: str | None  # as it was sent, with its slashes
    chunks: AsyncGenerator[bytes, None]
    content_type: str = ""  # as it was sent


def parse_form_boundary(content_type: str) -> bytes:
    """Raises InvalidRequest unless it is the type of a form, with its boundary."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind.decode("latin-1") != MULTIPART_TYPE or not 0 < len(boundary) <= 256:
        raise errors.InvalidRequest(f"this needs the type {MULTIPART_TYPE}, with a boundary")
    return boundary


async def iterate_form_parts(
    body: AsyncIterator[bytes], boundary: bytes, *, lenient: bool = False
) -> AsyncGenerator[FormPart, None]:
    """The fields of a form, in order. Raises InvalidRequest for an invalid or incomplete form.

    With `lenient`, a name that is not UTF-8 is not an error: it contains surrogates.
    """
    content_type = ""
    async with contextlib.aclosing(_iterate_form_tokens(body, boundary)) as tokens:
        async for kind, content in tokens:
            if kind == "type":
                content_type = content.decode("latin-1")
            if kind == "headers":
                async with contextlib.aclosing(_iterate_part_data(tokens)) as chunks:
                    yield FormPart(*_parse_part_names(content, lenient), chunks, content_type)
                    async for _skipped in chunks:
                        pass


async def read_field_text(part: FormPart) -> str:
    """The value of a field that is not a file. Raises FieldTooLong."""
    content = b""
    async for chunk in part.chunks:
        content += chunk
        if len(content) > MAX_FIELD_BYTES:
            raise FieldTooLong(f"the field {part.name} is too long: it has {MAX_FIELD_BYTES} bytes at most")
    return content.decode("utf-8", "replace")


async def _iterate_part_data(tokens: AsyncGenerator[tuple[str, bytes], None]) -> AsyncGenerator[bytes, None]:
    async for kind, content in tokens:
        if kind == "end":
            return
        yield content


def _parse_part_names(disposition: bytes, lenient: bool) -> tuple[str, str | None]:
    found = {name.lower(): value.strip() for name, value in _PARAMETER.findall(disposition.decode("latin-1"))}
    how = "surrogateescape" if lenient else "strict"
    try:
        given = {
            name: _unquote_parameter(found[name]).encode("latin-1").decode(errors=how)
            for name in ("name", "filename")
            if name in found
        }
        if "filename*" in found:  # RFC 5987: it takes precedence
            escaped = _unquote_parameter(found["filename*"]).split("'", 2)[-1]
            given["filename"] = unquote_to_bytes(escaped.encode("latin-1")).decode(errors=how)
        return given.get("name", ""), given.get("filename")
    except UnicodeDecodeError:
        raise errors.InvalidRequest("the name of a file in a form must be UTF-8") from None


def _unquote_parameter(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return _ESCAPED.sub(r"\1", value[1:-1]) if quoted else value


async def _iterate_form_tokens(body: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yields the tokens of each part.

    ("type", Content-Type), ("headers", Content-Disposition), then ("data", ..) any number of times, and ("end",
    b"").
    """
    form = _FormParser(boundary)
    async for chunk in body:
        step = CROWDED_STEP_BYTES if chunk.count(boundary) > MAX_PARTS_AT_ONCE else max(1, len(chunk))
        for start in range(0, len(chunk), step):
            for token in form.feed(chunk[start : start + step]):
                yield token
            await asyncio.sleep(0)  # a chunk of thousands of parts takes long, and others their turns meanwhile
    if not form.whole:
        raise errors.InvalidRequest(_CUT_OFF)


class _FormParser:
    def __init__(self, boundary: bytes):
        self.whole = False
        self._found: list[tuple[str, bytes]] = []
        self._field, self._value, self._disposition, self._type = b"", b"", b"", b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_data": lambda data, start, end: self._found.append(("data", data[start:end])),
                "on_part_end": lambda: self._found.append(("end", b"")),
                "on_header_begin": self._on_header_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """Parses a chunk and returns the new tokens. Raises InvalidRequest."""
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise errors.InvalidRequest(f"this is no form: {error}") from None
        found, self._found = self._found, []
        return found

    def _on_header_begin(self) -> None:
        self._field, self._value = b"", b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        elif self._field.lower() == b"content-type":
            self._type = self._value

    def _on_headers_finished(self) -> None:
        self._found += [("type", self._type), ("headers", self._disposition)]
        self._disposition, self._type = b"", b""

    def _on_end(self) -> None:
        self.whole = True
