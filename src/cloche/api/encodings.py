"""Bodies that come compressed, and answers that a client wants compressed."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

from cloche import errors

_GZIP = 31  # zlib's number for a gzip header and the largest window
_STEP_BYTES = 1 << 20


async def gunzipped(body: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """The content of a gzip stream, a megabyte at a time. Raises InvalidRequest if it is none, or cut off; TooLarge."""
    size, unpacking = 0, zlib.decompressobj(_GZIP)
    async for chunk in body:
        while chunk:
            if unpacking.eof:  # another member follows
                unpacking = zlib.decompressobj(_GZIP)
            content, chunk = _step(unpacking, chunk)
            size += len(content)
            if size > max_bytes:
                raise errors.TooLarge(
                    f"unpacked, the body is over the limit of {max_bytes} bytes: send less, or in parts"
                )
            if content:
                yield content
    if not unpacking.eof:
        raise errors.InvalidRequest("the gzip stream ended in the middle: send it again, whole")


def _step(unpacking: zlib._Decompress, chunk: bytes) -> tuple[bytes, bytes]:
    """Some content, and what of the chunk is left."""
    try:
        content = unpacking.decompress(chunk, _STEP_BYTES)
    except zlib.error:
        raise errors.InvalidRequest("the body is no gzip stream, though its Content-Encoding says so") from None
    return content, unpacking.unused_data if unpacking.eof else unpacking.unconsumed_tail


async def gzipped(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packing = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    async for chunk in body:
        if packed := packing.compress(chunk):
            yield packed
    yield packing.flush()


def chosen_encoding(accepted: str) -> str | None:
    """The best of identity and gzip for an `Accept-Encoding`: as it is, unless that is refused. None if both are."""
    weights = dict(_weight(each) for each in accepted.split(",") if each.strip())
    if weights.get("identity", weights.get("*", 1.0)) > 0:
        return "identity"
    return "gzip" if weights.get("gzip", weights.get("*", 0.0)) > 0 else None


def _weight(item: str) -> tuple[str, float]:
    name, _, parameters = item.partition(";")
    key, _, value = parameters.strip().partition("=")
    try:
        return name.strip().lower(), float(value) if key.strip() == "q" else 1.0
    except ValueError:
        return name.strip().lower(), 1.0
