"""`/v1/files`."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.encoding import inline_content_disposition
from cloche.api.http import DropConnection, StreamResponse, read_body_chunks
from cloche.api.multipart import (
    MULTIPART_TYPE,
    FieldTooLong,
    FormPart,
    iterate_form_parts,
    parse_form_boundary,
    read_field_text,
)
from cloche.api.openai.context import BadParameter, OpenAiContext, OpenAiNotFound
from cloche.api.openai.pagination import check_integer, decode_page, list_body
from cloche.api.openai.responses_request import missing_parameter
from cloche.model import MIB
from cloche.store.files import StoredFile, new_file_id

# Forms with one file, read as it arrives, and downloads of file contents.

TakeFile = Callable[[str, AsyncGenerator[bytes, None]], Awaitable[None]]

DEFAULT_FILE_NAME = "upload"
MAX_FIELDS = 20
BYTES_TYPE = "application/octet-stream"


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == MULTIPART_TYPE


async def take_form(request: Request, max_bytes: int, take: TakeFile) -> dict[str, str]:
    """Returns the fields of a form. `take` gets the name and the content of the field `file`, if there is one.

    Raises InvalidRequest for a body that is no form, has two files or too many fields, TooLarge, and the errors
    of `take`.
    """
    fields: dict[str, str] = {}
    taken, count = False, 0
    boundary = parse_form_boundary(request.headers.get("content-type", ""))
    async with (
        aclosing(read_body_chunks(request, max_bytes)) as body,
        aclosing(iterate_form_parts(body, boundary)) as form,
    ):
        async for part in form:
            count += 1  # parts, not names: they may all have the same
            if count > MAX_FIELDS:
                raise BadParameter(f"A form has {MAX_FIELDS} fields at most.", None)
            if part.name != "file":
                fields[part.name] = await _field_text(part)
            elif taken:
                raise BadParameter("Only one 'file' can be uploaded at a time.", "file")
            else:
                taken = True
                await take(part.filename or DEFAULT_FILE_NAME, part.chunks)
    return fields


async def _field_text(part: FormPart) -> str:
    try:
        return await read_field_text(part)
    except FieldTooLong:
        name = part.name[:100]
        raise BadParameter(f"Invalid '{name}': string too long.", name, "string_above_max_length") from None


def content_reply(
    name: str, size: int, chunks: AsyncGenerator[bytes, None], until: Callable[[], Awaitable[None]] | None = None
) -> StreamResponse:
    """A file as it is. `until` waits for the end of the sandbox that it comes from."""
    headers = {
        "content-length": str(size),
        "content-disposition": inline_content_disposition(name),
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }
    kind = mimetypes.guess_type(name)[0] or BYTES_TYPE
    return StreamResponse(_exact_chunks(chunks, size), headers=headers, media_type=kind, until=until)


async def _exact_chunks(chunks: AsyncGenerator[bytes, None], size: int) -> AsyncGenerator[bytes, None]:
    """Yields exactly `size` bytes: the length is promised, and a program may write to the file meanwhile."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk[:size]
            size -= min(len(chunk), size)
            if not size:
                return
    if size:
        raise DropConnection


PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_FILE_BYTES = 512 * MIB
MAX_FILE_NAME = 255
MIN_SECONDS, MAX_SECONDS = 3600, 2_592_000
MAX_LISTED = 10_000


class OpenAiFileRoutes:
    def __init__(self, api: OpenAiContext):
        self._api = api
        self._files = api.gateway.gateway_store.files
        self.routes = [
            api.route("POST", "/v1/files", self.create),
            api.route("GET", "/v1/files", self.list),
            api.route("GET", "/v1/files/{id}", self.get),
            api.route("DELETE", "/v1/files/{id}", self.delete),
            api.route("GET", "/v1/files/{id}/content", self.content),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._api.owner(request)
        await self._files.check_room(owner)
        upload = _OpenAiUpload(self._api)
        try:
            fields = await take_form(request, self._api.config.server.upload_bytes, upload.take)
            seconds = expiry_of(fields)
            purpose = purpose_of(fields)
            if upload.name is None:
                raise missing_parameter("file")
            name, size = upload.name, upload.size_bytes
            file = await self._files.add(upload.id, owner, filename=name, purpose=purpose, bytes=size, seconds=seconds)
        except BaseException:
            await self._files.drop(upload.id)
            raise
        return json_reply(file_body(file))

    async def list(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = decode_page(request.query_params, usual=MAX_LISTED, most=MAX_LISTED)
        found = await self._files.list(
            owner,
            purpose=request.query_params.get("purpose"),
            after=message.after,
            newest_first=message.order == "desc",
            limit=message.limit + 1,
        )
        page = [file_body(file) for file in found[: message.limit]]
        return json_reply(list_body(page, has_more=len(found) > message.limit))

    async def get(self, request: Request) -> Response:
        return json_reply(file_body(await self._requested_file(request)))

    async def delete(self, request: Request) -> Response:
        file = await self._requested_file(request)
        await self._files.remove(file.owner, file.id)
        return json_reply({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        file = await self._requested_file(request)
        return content_reply(file.filename, file.bytes, await self._files.chunks(file))

    async def _requested_file(self, request: Request) -> StoredFile:
        owner = self._api.owner(request)
        try:
            return await self._files.get(owner, request.path_params["id"])
        except errors.FileNotFound as error:
            raise OpenAiNotFound(str(error), "id") from None


class _OpenAiUpload:
    """The file of a form, written into the store."""

    def __init__(self, api: OpenAiContext):
        self._files = api.gateway.gateway_store.files
        self.id = new_file_id()
        self.name: str | None = None
        self.size_bytes = 0

    async def take(self, name: str, chunks: Any) -> None:
        self.size_bytes = await self._files.put_content(self.id, chunks, MAX_FILE_BYTES)
        self.name = stored_name(name)


def stored_name(name: str) -> str:
    """The file's name in the store: never a path, and always printable."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(each if each.isprintable() else "_" for each in last)[-MAX_FILE_NAME:] or "upload"


def purpose_of(fields: dict[str, str]) -> str:
    """Raises InvalidRequest."""
    purpose = fields.get("purpose")
    if not purpose:
        raise missing_parameter("purpose")
    if purpose not in PURPOSES:
        names = ", ".join(f"'{each}'" for each in PURPOSES)
        raise BadParameter(f"Invalid value: '{purpose[:100]}'. Supported values are: {names}.", "purpose")
    return purpose


def expiry_of(fields: dict[str, str]) -> int | None:
    """Returns the seconds until it expires. Raises InvalidRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor is None or seconds is None:
        raise missing_parameter("expires_after[anchor]" if anchor is None else "expires_after[seconds]")
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
