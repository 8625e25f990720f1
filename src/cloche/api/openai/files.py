"""`/v1/files`."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.encoding import disposition
from cloche.api.http import Dropped, Edge, Stream, body_chunks
from cloche.api.multipart import MULTIPART_TYPE, Part, boundary_of, parts
from cloche.api.openai.context import BadParameter, Door, NotThere, OpenAiErrors, json_reply
from cloche.api.openai.pagination import check_integer, list_body, page_asked
from cloche.api.openai.responses_request import missing
from cloche.model import MIB
from cloche.store.files import StoredFile, new_file_id

# Uploads: forms with one file, which is taken as it comes, and contents that go out.

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


PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_FILE_BYTES = 512 * MIB
MAX_NAME = 255
MIN_SECONDS, MAX_SECONDS = 3600, 2_592_000
MAX_LISTED = 10_000


class Files:
    def __init__(self, door: Door, dialect: OpenAiErrors):
        self._door = door
        self._files = door.gateway.shelf.files
        self.routes = [
            Route("/v1/files", Edge(dialect, self.create), methods=["POST"]),
            Route("/v1/files", Edge(dialect, self.list), methods=["GET"]),
            Route("/v1/files/{id}", Edge(dialect, self.get), methods=["GET"]),
            Route("/v1/files/{id}", Edge(dialect, self.delete), methods=["DELETE"]),
            Route("/v1/files/{id}/content", Edge(dialect, self.content), methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._door.owner_of(request)
        await self._files.check_room(owner)
        upload = _Upload(self._door)
        try:
            fields = await take_form(request, self._door.config.server.upload_bytes, upload.take)
            seconds = expiry_of(fields)
            purpose = purpose_of(fields)
            if upload.name is None:
                raise missing("file")
            name, size = upload.name, upload.size_bytes
            file = await self._files.add(upload.id, owner, filename=name, purpose=purpose, bytes=size, seconds=seconds)
        except BaseException:
            await self._files.drop(upload.id)
            raise
        return json_reply(file_body(file))

    async def list(self, request: Request) -> Response:
        owner = self._door.owner_of(request)
        asked = page_asked(request.query_params, usual=MAX_LISTED, most=MAX_LISTED)
        found = await self._files.list(
            owner,
            purpose=request.query_params.get("purpose"),
            after=asked.after,
            newest_first=asked.order == "desc",
            limit=asked.limit + 1,
        )
        page = [file_body(file) for file in found[: asked.limit]]
        return json_reply(list_body(page, has_more=len(found) > asked.limit))

    async def get(self, request: Request) -> Response:
        return json_reply(file_body(await self._asked(request)))

    async def delete(self, request: Request) -> Response:
        file = await self._asked(request)
        await self._files.remove(file.owner, file.id)
        return json_reply({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        file = await self._asked(request)
        return content_reply(file.filename, file.bytes, await self._files.chunks(file))

    async def _asked(self, request: Request) -> StoredFile:
        owner = self._door.owner_of(request)
        try:
            return await self._files.get(owner, request.path_params["id"])
        except errors.FileNotFound as error:
            raise NotThere(str(error), "id") from None


class _Upload:
    """The file of a form on its way into the store."""

    def __init__(self, door: Door):
        self._files = door.gateway.shelf.files
        self.id = new_file_id()
        self.name: str | None = None
        self.size_bytes = 0

    async def take(self, name: str, chunks: Any) -> None:
        self.size_bytes = await self._files.put_content(self.id, chunks, MAX_FILE_BYTES)
        self.name = stored_name(name)


def stored_name(name: str) -> str:
    """What it is called: never a path, and always printable."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(each if each.isprintable() else "_" for each in last)[-MAX_NAME:] or "upload"


def purpose_of(fields: dict[str, str]) -> str:
    """Raises InvalidRequest."""
    purpose = fields.get("purpose")
    if not purpose:
        raise missing("purpose")
    if purpose not in PURPOSES:
        names = ", ".join(f"'{each}'" for each in PURPOSES)
        raise BadParameter(f"Invalid value: '{purpose[:100]}'. Supported values are: {names}.", "purpose")
    return purpose


def expiry_of(fields: dict[str, str]) -> int | None:
    """After how many seconds it expires. Raises InvalidRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor is None or seconds is None:
        raise missing("expires_after[anchor]" if anchor is None else "expires_after[seconds]")
    if anchor != "created_at":
        raise BadParameter(
            f"Invalid value: '{anchor[:100]}'. Supported values are: 'created_at'.", "expires_after[anchor]"
        )
    param = "expires_after[seconds]"
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 20):
        raise BadParameter(f"Invalid type for '{param}': expected an integer.", param, "invalid_type")
    return check_integer(param, int(seconds), MIN_SECONDS, MAX_SECONDS)


def file_body(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
