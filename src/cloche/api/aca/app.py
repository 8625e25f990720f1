"""Dynamic sessions as one ASGI application."""

from __future__ import annotations

import contextlib
import posixpath
import secrets
import time
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.aca.cells import encode_first, encode_streams, run_cell
from cloche.api.aca.sessions import AzureContext, error_reply
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectRouter, Json, format_timestamp, json_reply
from cloche.api.http import StreamResponse, read_body_chunks, run_unless_disconnected, strip_prefix
from cloche.api.multipart import iterate_form_parts, parse_form_boundary
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import FileInfo, Struct

MAX_UPLOADED_FILES = 100  # of one form: each is a write in the sandbox
DIRECTORY = "/mnt/data/"
FILE_HEADERS = {"content-security-policy": "sandbox", "x-content-type-options": "nosniff"}

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class AzureCode(Struct, rename="camel"):
    """`codeInputType` and `executionType` have one meaning each: code comes inline, and the reply has its result."""

    code: str | None = None
    shell_command: str | None = None
    timeout_in_seconds: Seconds | None = None
    execution_type: str = "Synchronous"


class FirstCode(Struct):
    """The body of API version 2024-02-02-preview."""

    properties: AzureCode


class SessionRoutes:
    def __init__(self, api: AzureContext):
        self._api = api

    def routes(self) -> list[Route]:
        return [route for base in ("", "/{pool}") for route in self._routes_at(base)]

    def _routes_at(self, base: str) -> list[Route]:
        route = self._api.route
        return [
            route("POST", base + "/code/execute", self.execute),
            route("POST", base + "/code/execute/", self.execute),  # as Semantic Kernel writes it
            route("POST", base + "/executions", self.start_execution),
            route("GET", base + "/files", self.list_files),
            route("POST", base + "/files", self.upload),
            route("POST", base + "/files/upload", self.upload),
            route("GET", base + "/files/content/{name:path}", self.download),
            route("GET", base + "/files/{name}/content", self.download),
            route("DELETE", base + "/session", self.end),
        ]

    async def execute(self, request: Request) -> Response:
        self._api.admit(request)
        asked = (await self._api.json_body(request, FirstCode)).properties
        sandbox = await self._api.sandbox(request)
        running = run_cell(sandbox, asked.code or "", asked.timeout_in_seconds)
        return json_reply(encode_first(await run_unless_disconnected(request, running)))

    async def start_execution(self, request: Request) -> Response:
        self._api.admit(request)
        asked = await self._api.json_body(request, AzureCode)
        if asked.execution_type.lower() != "synchronous":
            raise errors.InvalidRequest("executionType must be Synchronous")
        body = {
            "id": secrets.token_hex(16),
            "identifier": request.query_params.get("identifier"),
            "executionType": "Synchronous",
        }
        made = await run_unless_disconnected(request, self._run(request, asked))
        return json_reply({**body, **made})

    async def _run(self, request: Request, asked: AzureCode) -> Json:
        """The state and result of code in the kernel, or of a shell command, whose state is its exit code."""
        sandbox = await self._api.sandbox(request)
        if asked.shell_command is not None:
            began_at = time.monotonic()
            ran = await sandbox.commands.run(asked.shell_command, timeout_seconds=asked.timeout_in_seconds)
            milliseconds = round((time.monotonic() - began_at) * 1000)
            return {"status": str(ran.exit_code), "result": encode_streams(ran.stdout, ran.stderr, milliseconds)}
        got = await run_cell(sandbox, asked.code or "", asked.timeout_in_seconds)
        result = encode_streams(got.stdout, got.stderr, got.milliseconds, got.result)
        return {"status": "Succeeded" if got.succeeded else "Failed", "result": result}

    async def list_files(self, request: Request) -> Response:
        files = await (await self._api.sandbox(request)).files.list(DIRECTORY)
        return json_reply({"value": [_encode_file(each) for each in files if each.kind == "file"]})

    async def upload(self, request: Request) -> Response:
        self._api.admit(request)
        boundary = parse_form_boundary(request.headers.get("content-type", ""))
        sandbox = await self._api.sandbox(request)
        made: list[FileInfo] = []
        chunks = read_body_chunks(request, self._api.config.server.upload_bytes)
        async with contextlib.aclosing(iterate_form_parts(chunks, boundary)) as parts:
            async for part in parts:
                if part.filename is not None:
                    if len(made) == MAX_UPLOADED_FILES:
                        raise errors.InvalidRequest(
                            f"a form has at most {MAX_UPLOADED_FILES} files: send the rest apart"
                        )
                    made.append(await sandbox.files.write(_file_path(part.filename), part.chunks, below=DIRECTORY))
        if not made:
            raise errors.InvalidRequest("a file is needed: send it as the part `file` of a form")
        encoded = [_encode_file(each) for each in made]
        return json_reply({"value": encoded, **encoded[0]})

    async def download(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        file = await sandbox.files.open(_file_path(request.path_params["name"]))
        if file.inline_content is not None:
            return Response(file.inline_content, headers=FILE_HEADERS, media_type="application/octet-stream")
        return StreamResponse(file.until_read(), headers=FILE_HEADERS, until=sandbox.wait_ended)

    async def end(self, request: Request) -> Response:
        handle = await self._api.find_session(request)
        if handle is not None:
            await handle.kill()
        return Response(status_code=204)


def _file_path(name: str) -> str:
    """Below /mnt/data, as clients name it: with or without that. Raises InvalidRequest."""
    relative = posixpath.normpath(name.removeprefix(DIRECTORY))
    if relative.startswith(("/", "..")) or relative == ".":
        raise errors.InvalidRequest(f"{name[:200]!r} is no name of a file below {DIRECTORY}")
    return DIRECTORY + relative


def _encode_file(file: FileInfo) -> Json:
    """With the fields of every API version."""
    at = format_timestamp(file.modified_at)
    first = {"filename": file.name, "size": file.size_bytes, "lastModifiedTime": at}
    later = {"name": file.name, "sizeInBytes": file.size_bytes, "lastModifiedAt": at, "type": "file"}
    return {"properties": first, **later, "directory": DIRECTORY.rstrip("/")}


class AzureSessions:
    """Serves requests under `/aca`, and `/aca/TEMPLATE`."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        api = AzureContext(engine, gatekeeper, config)
        self._router = DialectRouter(SessionRoutes(api).routes(), _missing_reply)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "there is no WebSocket here"})
            return
        strip_prefix(scope, ("/aca",))
        await self._router(scope, receive, send)


def _missing_reply(status: int, message: str) -> Response:
    return error_reply(status, "NotFound" if status == 404 else "MethodNotAllowed", message)
