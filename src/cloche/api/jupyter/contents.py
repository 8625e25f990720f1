"""`/api/contents`: the files of a sandbox, below its working directory."""

from __future__ import annotations

import base64
import mimetypes
import posixpath
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import Conflict, decode_json, decode_json_body, json_reply
from cloche.api.http import decode_apart, read_decoded
from cloche.api.jupyter.context import JupyterContext
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB, FileInfo, Struct

MAX_FILE_BYTES = 32 * MIB  # of a file in one response: larger ones go by other dialects
MAX_SAVE_BYTES = 64 * MIB  # of a request: base64 and JSON take more
MAX_UNTITLED = 1000
_EMPTY_NOTEBOOK = b'{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}\n'
_EXTENSIONS = {"notebook": ".ipynb", "file": ".txt", "directory": ""}


class SaveRequest(Struct):
    """The body of a PUT."""

    type: str = "file"
    format: str | None = None
    content: msgspec.Raw = msgspec.Raw()
    chunk: int | None = None


class NewFileRequest(Struct):
    """The body of a POST: an untitled file, or a copy."""

    type: str = "file"
    ext: str | None = None
    copy_from: str | None = None


class RenameRequest(Struct):
    path: str


class ContentRoutes:
    def __init__(self, api: JupyterContext):
        self._api = api

    def routes_at(self, base: str) -> list[BaseRoute]:
        route = self._api.route
        return [
            each
            for path in (base + "/api/contents", base + "/api/contents/{path:path}")
            for each in (
                route("GET", path, self.get),
                route("PUT", path, self.save),
                route("POST", path, self.create),
                route("PATCH", path, self.rename),
                route("DELETE", path, self.delete),
            )
        ]

    async def get(self, request: Request) -> Response:
        sandbox = await self._api.named_sandbox(request)
        query = request.query_params
        info = await _stat(sandbox, _requested_path(request))
        if query.get("type") == "directory" and not _is_directory(info):
            raise errors.InvalidRequest(f"{_requested_path(request)} is not a directory")
        if query.get("content", "1") == "0":
            return json_reply(file_model(sandbox, info, query.get("type")))
        return json_reply(await _read_model(sandbox, info, query.get("type"), query.get("format")))

    async def save(self, request: Request) -> Response:
        sandbox = await self._api.named_sandbox(request)
        path = _requested_path(request)
        asked = await read_decoded(request, lambda body: decode_json_body(body, SaveRequest), MAX_SAVE_BYTES)
        if asked.chunk is not None:
            raise errors.InvalidRequest("send a file in one request, without chunk")
        place = _place_of(sandbox, path)
        existed = await sandbox.files.exists(place)
        if asked.type == "directory":
            await sandbox.files.make_dir(place)
        else:
            await sandbox.files.write(place, decode_saved_content(asked))
        return json_reply(file_model(sandbox, await _stat(sandbox, path), asked.type), 200 if existed else 201)

    async def create(self, request: Request) -> Response:
        sandbox = await self._api.named_sandbox(request)
        directory = _requested_path(request)
        asked = await self._api.json_body(request, NewFileRequest)
        if asked.copy_from is not None:
            source = check_path(asked.copy_from)
            stem, extension = posixpath.splitext(posixpath.basename(source))
            content = await _read_file(sandbox, source)
            path = await _free_path(sandbox, directory, f"{stem}-Copy", extension)
        else:
            if asked.type not in _EXTENSIONS:
                raise errors.InvalidRequest(f"type must be one of {', '.join(_EXTENSIONS)}")
            extension = _EXTENSIONS[asked.type] if asked.ext is None else asked.ext
            content = _EMPTY_NOTEBOOK if extension == ".ipynb" else b""
            stem = {"notebook": "Untitled", "directory": "Untitled Folder"}.get(asked.type, "untitled")
            path = await _free_path(sandbox, directory, stem, extension)
        place = _place_of(sandbox, path)
        if asked.type == "directory" and asked.copy_from is None:
            await sandbox.files.make_dir(place)
        else:
            await sandbox.files.write(place, content)
        return json_reply(file_model(sandbox, await _stat(sandbox, path)), 201)

    async def rename(self, request: Request) -> Response:
        sandbox = await self._api.named_sandbox(request)
        path = _requested_path(request)
        wanted = check_path((await self._api.json_body(request, RenameRequest)).path)
        if wanted != path:
            if await sandbox.files.exists(_place_of(sandbox, wanted)):
                raise Conflict(f"File already exists: {wanted}")
            await sandbox.files.move(_place_of(sandbox, path), _place_of(sandbox, wanted))
        return json_reply(file_model(sandbox, await _stat(sandbox, wanted)))

    async def delete(self, request: Request) -> Response:
        sandbox = await self._api.named_sandbox(request)
        path = _requested_path(request)
        if not path:
            raise errors.InvalidRequest("the directory of the sandbox itself cannot be removed")
        await sandbox.files.remove(_place_of(sandbox, path))
        return Response(status_code=204)


def check_path(path: str) -> str:
    """A path below the working directory, without slashes around it. Raises InvalidPath."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise errors.InvalidPath(f"{path!r} leads out of the directory of the sandbox")
    return "/".join(parts)


def _requested_path(request: Request) -> str:
    return check_path(request.path_params.get("path", ""))


def _place_of(sandbox: Sandbox, path: str) -> str:
    return posixpath.join(sandbox.spec.cwd, path) if path else sandbox.spec.cwd


def _is_directory(info: FileInfo) -> bool:
    return (info.kind if info.leads_to is None else info.leads_to.kind) == "directory"


async def _stat(sandbox: Sandbox, path: str) -> FileInfo:
    return await sandbox.files.stat(_place_of(sandbox, path))


async def _read_file(sandbox: Sandbox, path: str) -> bytes:
    """The whole content. Raises TooLarge."""
    async with await sandbox.files.open(_place_of(sandbox, path)) as file:
        if file.size_bytes > MAX_FILE_BYTES:
            raise errors.TooLarge(f"{path} has {file.size_bytes} bytes, and {MAX_FILE_BYTES} are possible here")
        return b"".join([chunk async for chunk in file.chunks(0, file.size_bytes)])


async def _free_path(sandbox: Sandbox, directory: str, stem: str, extension: str) -> str:
    """A path there at which nothing is. Raises Conflict, InvalidPath."""
    for number in range(MAX_UNTITLED):
        path = check_path(f"{directory}/{stem}{number or ''}{extension}")
        if not await sandbox.files.exists(_place_of(sandbox, path)):
            return path
    raise Conflict(f"there are {MAX_UNTITLED} files of that name already: name one yourself")


async def _read_model(sandbox: Sandbox, info: FileInfo, type: str | None, format: str | None) -> dict[str, Any]:
    """The model of a file with its content, of a directory with its entries."""
    model = file_model(sandbox, info, type)
    if model["type"] == "directory":
        found = await sandbox.files.list(info.path)
        entries = [file_model(sandbox, each) for each in found if not each.name.startswith(".")]
        return {**model, "format": "json", "content": entries}
    encode = partial(encode_file_content, type=model["type"], format=format)
    content, shown = await decode_apart(encode, await _read_file(sandbox, model["path"]))
    return {**model, "content": content, "format": shown}


def file_model(sandbox: Sandbox, info: FileInfo, type: str | None = None) -> dict[str, Any]:
    """The model of an entry, without its content."""
    path = posixpath.relpath(info.path, sandbox.spec.cwd)
    modified = datetime.fromtimestamp(min(max(info.modified_at, 0), 253402300799), UTC).isoformat()
    directory = _is_directory(info)
    kind = "directory" if directory else "notebook" if info.name.endswith(".ipynb") and type != "file" else "file"
    return {
        "name": info.name if path != "." else "",
        "path": path if path != "." else "",
        "type": kind,
        "created": modified,
        "last_modified": modified,
        "content": None,
        "format": None,
        "mimetype": mimetypes.guess_type(info.name)[0] if kind == "file" else None,
        "size": None if directory else info.size_bytes,
        "writable": True,
    }


def encode_file_content(content: bytes, type: str, format: str | None) -> tuple[Any, str]:
    """The content as a client wants it, and its format. Raises InvalidRequest for one of another kind."""
    if type == "notebook":
        return decode_json(content), "json"
    if format != "base64":
        try:
            return content.decode(), "text"
        except UnicodeDecodeError:
            if format == "text":
                raise errors.InvalidRequest("the file is not UTF-8: ask for it with format=base64") from None
    return base64.b64encode(content).decode(), "base64"


def decode_saved_content(asked: SaveRequest) -> bytes:
    """The bytes of a file that is saved. Raises InvalidRequest."""
    if bytes(asked.content) in (b"", b"null"):
        raise errors.InvalidRequest("No content: a file or notebook is saved with its content")
    if asked.type == "notebook" or asked.format == "json":
        return msgspec.json.format(bytes(asked.content), indent=1) + b"\n"
    try:
        text = msgspec.json.decode(asked.content, type=str)
        return base64.b64decode(text, validate=True) if asked.format == "base64" else text.encode()
    except (msgspec.MsgspecError, ValueError):
        raise errors.InvalidRequest("content must be a string: text, or base64 with format=base64") from None
