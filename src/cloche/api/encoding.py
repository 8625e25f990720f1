"""Encodings of bodies: gzip, ASCII JSON, byte ranges, and the headers of file downloads."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import AsyncIterator, Mapping
from email.utils import formatdate
from typing import Any, NamedTuple
from urllib.parse import quote

from cloche import errors

_GZIP = 31  # zlib's number for a gzip header and the largest window
_STEP_BYTES = 1 << 20


async def decompress_gzip(body: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Decompresses a gzip stream, a megabyte at a time.

    Raises InvalidRequest if invalid or truncated; TooLarge.
    """
    size, unpacking = 0, zlib.decompressobj(_GZIP)
    async for chunk in body:
        while chunk:
            if unpacking.eof:  # another member follows
                unpacking = zlib.decompressobj(_GZIP)
            content, chunk = _decompress_step(unpacking, chunk)
            size += len(content)
            if size > max_bytes:
                raise errors.TooLarge(
                    f"unpacked, the body is over the limit of {max_bytes} bytes: send less, or in parts"
                )
            if content:
                yield content
    if not unpacking.eof:
        raise errors.InvalidRequest("the gzip stream ended in the middle: send it again, whole")


def _decompress_step(unpacking: zlib._Decompress, chunk: bytes) -> tuple[bytes, bytes]:
    """Returns some content, and the rest of the chunk."""
    try:
        content = unpacking.decompress(chunk, _STEP_BYTES)
    except zlib.error:
        raise errors.InvalidRequest("the body is no gzip stream, though its Content-Encoding says so") from None
    return content, unpacking.unused_data if unpacking.eof else unpacking.unconsumed_tail


async def compress_gzip(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packing = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    async for chunk in body:
        if packed := packing.compress(chunk):
            yield packed
    yield packing.flush()


def choose_content_encoding(accepted: str) -> str | None:
    """The best of identity and gzip for an `Accept-Encoding`: identity unless refused.

    None if both are refused.
    """
    weights = dict(_parse_encoding_weight(each) for each in accepted.split(",") if each.strip())
    if weights.get("identity", weights.get("*", 1.0)) > 0:
        return "identity"
    return "gzip" if weights.get("gzip", weights.get("*", 0.0)) > 0 else None


def _parse_encoding_weight(item: str) -> tuple[str, float]:
    name, _, parameters = item.partition(";")
    key, _, value = parameters.strip().partition("=")
    try:
        return name.strip().lower(), float(value) if key.strip() == "q" else 1.0
    except ValueError:
        return name.strip().lower(), 1.0


# ASCII-only JSON without NaN or infinities.
#
# For clients that split lines at any Unicode line break, or decode bytes chunk by chunk.


def ascii_json(value: Any) -> bytes:
    """Encodes one line. Numbers that JSON cannot express, which a guest may send, become null."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:  # NaN, which JavaScript cannot read
        return json.dumps(_replace_non_finite(value)).encode()


def to_json_value(value: Any) -> Any:
    """The value of a display: bytes in base64, others as they are."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(one) for key, one in value.items()}
    return [_replace_non_finite(one) for one in value] if isinstance(value, list) else value


# File downloads: the `Range` header, `Last-Modified` and `Content-Disposition`.

_ONE_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})")
_LAST_SECONDS = 253402300799  # of the year 9999
_TOKEN = re.compile(r"[A-Za-z0-9!#$&+.^_`|~-]+")


class RequestedRange(NamedTuple):
    """The bytes from `start` up to `end`, of `size` bytes."""

    start: int
    end: int
    size: int

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.end - 1}/{self.size}"


class RangeNotSatisfiable(Exception):
    """The range starts beyond the end of the file."""


def parse_range_header(header: str | None, size: int) -> RequestedRange | None:
    """The requested range; None for no, several or invalid ranges: then the whole file is sent.

    Raises RangeNotSatisfiable.
    """
    match = _ONE_RANGE.fullmatch(header.strip()) if header else None
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, end = max(size - int(match[2]), 0), size
    else:
        start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= size or start >= end:
        raise RangeNotSatisfiable
    return RequestedRange(start, end, size)


def format_last_modified(seconds: float) -> str:
    """The header's value. Times before 1970 or after the year 9999, which a file may have, are clamped."""
    return formatdate(min(max(0, seconds), _LAST_SECONDS), usegmt=True)


def inline_content_disposition(name: str) -> str:
    """`Content-Disposition` for a file that browsers show inline."""
    if _TOKEN.fullmatch(name):
        return f"inline; filename={name}"
    if name.isascii() and name.isprintable():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        return f'inline; filename="{escaped}"'
    return f"inline; filename*=utf-8''{quote(name, safe='')}"
