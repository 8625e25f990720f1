"""Uploads: forms with one file, which is taken as it comes, and contents that go out."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.requests import Request

from cloche.api.encoding import disposition
from cloche.api.http import Dropped, Stream, body_chunks
from cloche.api.multipart import MULTIPART_TYPE, Part, boundary_of, parts
from cloche.api.openai.dialect import BadParameter

Take = Callable[[str, AsyncGenerator[bytes, None]], Awaitable[None]]

NAMELESS = "upload"
MAX_FIELDS = 20
MAX_FIELD_BYTES = 4096
BYTES_TYPE = "application/octet-stream"


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == MULTIPART_TYPE


async def take_form(request: Request, max_bytes: int, take: Take) -> dict[str, str]:
    """The fields of a form. `take` gets the name and the content of the field `file`, if there is one.

    Raises InvalidRequest for what is no form, has two files or too much else, TooLarge, and what `take` raises.
    """
    fields: dict[str, str] = {}
    taken, count = False, 0
    boundary = boundary_of(request.headers.get("content-type", ""))
    async with aclosing(body_chunks(request, max_bytes)) as body, aclosing(parts(body, boundary)) as form:
        async for part in form:
            count += 1  # parts, not names: they may all have the same
            if count > MAX_FIELDS:
                raise BadParameter(f"A form has {MAX_FIELDS} fields at most.", None)
            if part.name != "file":
                fields[part.name] = await _text(part)
            elif taken:
                raise BadParameter("Only one 'file' can be uploaded at a time.", "file")
            else:
                taken = True
                await take(part.filename or NAMELESS, part.chunks)
    return fields


async def _text(part: Part) -> str:
    content = b""
    async for chunk in part.chunks:
        content += chunk
        if len(content) > MAX_FIELD_BYTES:
            raise BadParameter(
                f"Invalid '{part.name[:100]}': string too long.", part.name[:100], "string_above_max_length"
            )
    return content.decode("utf-8", "replace")


def content_reply(
    name: str, size: int, chunks: AsyncGenerator[bytes, None], until: Callable[[], Awaitable[None]] | None = None
) -> Stream:
    """A file as it is. `until` is the end of the sandbox that it comes from."""
    headers = {
        "content-length": str(size),
        "content-disposition": disposition(name),
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }
    kind = mimetypes.guess_type(name)[0] or BYTES_TYPE
    return Stream(_exactly(chunks, size), headers=headers, media_type=kind, until=until)


async def _exactly(chunks: AsyncGenerator[bytes, None], size: int) -> AsyncGenerator[bytes, None]:
    """A program may write to the file while it is sent, and its length is promised already."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk[:size]
            size -= min(len(chunk), size)
            if not size:
                return
    if size:
        raise Dropped
