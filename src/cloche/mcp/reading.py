"""A file of a sandbox as bytes in memory, within bounds: a sparse one may claim any size."""

from __future__ import annotations

import contextlib

from cloche import errors
from cloche.sdk import seam

MOST_BYTES = 16 << 20


async def contents(files: seam.Files, path: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Raises TooLarge as soon as it is clear, and what reading does."""
    chunks, size = [], 0
    async with contextlib.aclosing(await files.open_read(path)) as reading:
        async for chunk in reading:
            size += len(chunk)
            if size > most_bytes:
                raise errors.TooLarge(
                    f"{path} has more than the {most_bytes} bytes that one answer can carry: read a part of it with "
                    "run_code or run_command"
                )
            chunks.append(chunk)
    return b"".join(chunks)
