"""The routes about files: most are an operation of the program inside, with the paths made absolute here."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import encoded_json_reply, json_reply
from cloche.api.http import Handler, StreamResponse, read_body_chunks, run_unless_disconnected
from cloche.api.multipart import iterate_form_parts, parse_form_boundary
from cloche.api.open_terminal import arguments
from cloche.api.open_terminal.context import InvalidQuery, OpenTerminalContext, decode_query, directory_of
from cloche.api.open_terminal.workspace import HOME, Refusal, Workspace, resolve_path
from cloche.engine.sandboxes.sandbox import Sandbox

PATH_FIELDS = ("path", "directory", "source", "destination", "original", "revised")
BINARY_STATUS = 210  # of the program inside: the file itself is the answer
BYTES_TYPE = "application/octet-stream"
_MEDIA_TYPE = re.compile(r"[a-z]+/[a-zA-Z0-9.+-]{1,100}")
FILE_HEADERS = {
    # A file is a stranger's: no page of it may act in the name of the server that it comes from.
    "content-security-policy": "sandbox",
    "x-content-type-options": "nosniff",
}


class FileRoute(NamedTuple):
    """`in_chat`: relative paths begin in the chat's working directory; else in the home directory."""

    method: str
    path: str
    operation: str
    arguments: type[msgspec.Struct]
    in_chat: bool = False


FILE_ROUTES = (
    FileRoute("GET", "/files/list", "list_directory", arguments.DirectoryArgument, True),
    FileRoute("GET", "/files/read", "read", arguments.ReadArguments, True),
    FileRoute("GET", "/files/display", "display", arguments.PathArgument, True),
    FileRoute("GET", "/files/view", "view", arguments.ViewArguments),
    FileRoute("POST", "/files/write", "write", arguments.WriteFileBody, True),
    FileRoute("POST", "/files/mkdir", "make_directory", arguments.PathArgument),
    FileRoute("DELETE", "/files/delete", "delete", arguments.PathArgument),
    FileRoute("POST", "/files/move", "move", arguments.MovePathsBody),
    FileRoute("POST", "/files/replace", "replace", arguments.ReplaceFileBody, True),
    FileRoute("GET", "/files/grep", "grep", arguments.GrepArguments, True),
    FileRoute("GET", "/files/matches", "match", arguments.MatchArguments, True),
    FileRoute("GET", "/files/search", "find_names", arguments.SearchArguments, True),
    FileRoute("GET", "/files/glob", "find_pattern", arguments.GlobArguments, True),
    FileRoute("POST", "/files/compare", "compare", arguments.CompareBody, True),
)


class FileRoutes:
    def __init__(self, api: OpenTerminalContext):
        self._api = api

    def routes(self) -> list[BaseRoute]:
        route = self._api.route
        return [
            *(route(each.method, each.path, self._handler_of(each)) for each in FILE_ROUTES),
            route("GET", "/files/cwd", self.tell_directory),
            route("POST", "/files/cwd", self.enter_directory),
            route("GET", "/files/serve/{path:path}", self.serve),
            route("POST", "/files/upload", self.upload),
            route("POST", "/files/archive", self.archive),
            route("GET", "/skills", self.list_skills),
            route("GET", "/skills/read", self.read_skill),
        ]

    def _handler_of(self, route: FileRoute) -> Handler:
        async def handle(request: Request) -> Response:
            self._api.workspace_key(request)
            asked = msgspec.to_builtins(await self._api.arguments(request, route.arguments))
            asked.pop("preview", None)  # a picture of a document is made by the client
            workspace = await self._api.workspace(request)
            directory = directory_of(workspace, request, in_chat=route.in_chat)
            asked |= {name: resolve_path(asked[name], directory) for name in PATH_FIELDS if name in asked}
            return await self._perform(request, workspace, route.operation, asked)

        return handle

    async def _perform(self, request: Request, workspace: Workspace, operation: str, asked: dict[str, Any]) -> Response:
        try:
            reply = await run_unless_disconnected(request, workspace.perform(operation, **asked))
        except Refusal as refusal:
            if refusal.status != BINARY_STATUS:
                raise
            return await _file_response(await workspace.sandbox(), asked["path"], str(refusal))
        return encoded_json_reply(reply)

    async def tell_directory(self, request: Request) -> Response:
        workspace = self._api.find_workspace(request)
        directory = HOME if workspace is None else directory_of(workspace, request)
        return json_reply({"cwd": directory, "home": HOME, "root": {"path": HOME, "label": "Home"}})

    async def enter_directory(self, request: Request) -> Response:
        self._api.workspace_key(request)
        asked = await self._api.arguments(request, arguments.PathArgument)
        workspace = await self._api.workspace(request)
        path = resolve_path(asked.path, HOME)
        reply = await run_unless_disconnected(request, workspace.perform("enter", path=path))
        workspace.enter_directory(request.headers.get("x-session-id", ""), path)
        return encoded_json_reply(reply)

    async def serve(self, request: Request) -> Response:
        """As `/files/view`, for links between the files of a page."""
        workspace = await self._api.workspace(request)
        path = resolve_path("/" + request.path_params["path"], HOME)
        return await self._perform(request, workspace, "view", {"path": path})

    async def upload(self, request: Request) -> Response:
        """The form's field `file`."""
        self._api.workspace_key(request)
        asked = decode_query(request, arguments.UploadArguments)
        boundary = parse_form_boundary(request.headers.get("content-type", ""))
        sandbox = await (await self._api.workspace(request)).sandbox()
        body = read_body_chunks(request, self._api.config.server.upload_bytes)
        async with contextlib.aclosing(body), contextlib.aclosing(iterate_form_parts(body, boundary)) as parts:
            async for part in parts:
                if part.name == "file":
                    name = posixpath.basename(part.filename or "") or "upload"
                    path = resolve_path(posixpath.join(asked.directory, name), HOME)
                    info = await sandbox.files.write(path, part.chunks, in_place=True)
                    return json_reply({"path": path, "size": info.size_bytes})
        raise InvalidQuery("Field required", "file")

    async def archive(self, request: Request) -> Response:
        self._api.workspace_key(request)
        asked = await self._api.arguments(request, arguments.ArchiveBody)
        workspace = await self._api.workspace(request)
        paths = [resolve_path(each, HOME) for each in asked.paths]
        reply = await run_unless_disconnected(request, workspace.perform("archive", paths=paths, names=asked.paths))
        made = msgspec.json.decode(reply, type=dict[str, str])
        name = re.sub(r'[^\x20-\x7e]|["\\]', "_", made["name"])
        return await _file_response(await workspace.sandbox(), made["archive"], "application/zip", name + ".zip")

    async def list_skills(self, request: Request) -> Response:
        return await self._perform(request, await self._api.workspace(request), "list_skills", {"home": HOME})

    async def read_skill(self, request: Request) -> Response:
        self._api.workspace_key(request)
        name = decode_query(request, arguments.SkillArgument).name
        workspace = await self._api.workspace(request)
        return await self._perform(request, workspace, "read_skill", {"home": HOME, "name": name})


async def _file_response(sandbox: Sandbox, path: str, kind: str, attached: str = "") -> Response:
    """The file's bytes. One that is sent as an attachment was made for that, and is removed afterwards."""
    file = await sandbox.files.open(path)
    headers = {**FILE_HEADERS, "content-length": str(file.size_bytes)}
    if attached:
        headers["content-disposition"] = f'attachment; filename="{attached}"'

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            async with file, contextlib.aclosing(file.chunks(0, file.size_bytes)) as parts:
                async for part in parts:
                    yield part
        finally:
            if attached:
                with contextlib.suppress(errors.ClocheError):
                    await sandbox.files.remove(path)

    media = kind if _MEDIA_TYPE.fullmatch(kind) else BYTES_TYPE
    return StreamResponse(chunks(), headers=headers, media_type=media, until=sandbox.wait_ended)
