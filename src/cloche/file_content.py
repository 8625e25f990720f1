"""The content of a file as callers give it: bytes, text, or chunks of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable

from cloche import errors

Chunk = bytes | bytearray | memoryview | str
Chunks = Iterable[Chunk] | AsyncIterable[Chunk]
Content = Chunk | Chunks


async def encode_chunks(content: Chunks) -> AsyncGenerator[bytes, None]:
    """Each chunk as bytes. Raises InvalidRequest at one that is neither bytes nor text."""
    if isinstance(content, AsyncIterable):
        async for chunk in content:
            yield encode_chunk(chunk)
    else:
        for chunk in content:
            yield encode_chunk(chunk)


def encode_chunk(chunk: object) -> bytes:
    """Raises InvalidRequest unless it is bytes or text."""
    if isinstance(chunk, (bytes, bytearray, memoryview)):
        return bytes(chunk)
    if not isinstance(chunk, str):
        raise errors.InvalidRequest(f"a file's content must come as bytes or text, not as {type(chunk).__name__}")
    try:
        return chunk.encode()
    except UnicodeEncodeError:
        raise errors.InvalidRequest("text for a file must be valid Unicode: give bytes for anything else") from None
