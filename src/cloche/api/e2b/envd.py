"""envd (port 49983): its HTTP endpoints and its two Connect services. Tokens are checked before it comes here."""

from __future__ import annotations

import contextlib
import mimetypes
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.e2b import connect, filesystem, process
from cloche.api.e2b import envd_schema as wire
from cloche.api.e2b.registry import Resident, Residents, away_reply
from cloche.api.e2b.replies import AWAY, error_reply, json_reply
from cloche.api.encoding import (
    Span,
    Unsatisfiable,
    asked_span,
    chosen_encoding,
    disposition,
    gunzipped,
    gzipped,
    last_modified,
)
from cloche.api.http import Dropped, Edge, Handler, Stream, body_chunks, status_of, whole_body
from cloche.api.multipart import MULTIPART_TYPE, boundary_of, parts
from cloche.config import Config
from cloche.engine.sandboxes.files import INLINE_BYTES, Content, Files, OpenFile
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB, FileAttributes, User

# envd's files over HTTP: `GET /files` and `POST /files`. Contents are streamed in both directions.

BYTES_TYPE = "application/octet-stream"
_FIELD = "file"  # the field of a form that holds a file; others are ignored


class FilesHttp:
    """`max_bytes` is the most that one upload may have, unpacked."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes

    async def read(self, request: Request) -> Response:
        user = wire.user_asked(request)
        path = wire.absolute(request.query_params.get("path", ""), user)
        encoding = chosen_encoding(request.headers.get("accept-encoding", ""))
        if encoding is None:
            return error_reply(406, "this can be had as it is (identity) and as gzip, and neither is accepted")
        sandbox: Sandbox = request.scope["state"]["resident"].sandbox
        file = await _opened(sandbox, path, user)
        try:
            return _answer(file, path, request, encoding, sandbox)
        except BaseException:
            file.close()
            raise

    async def write(self, request: Request) -> Response:
        user = wire.user_asked(request)
        upload = Upload(request.scope["state"]["resident"].sandbox, user, wire.metadata_asked(request.headers))
        path = request.query_params.get("path")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        async with contextlib.aclosing(self._body(request)) as body:
            if kind == MULTIPART_TYPE:
                await upload.take_form(body, boundary_of(request.headers["content-type"]), path)
            elif kind == BYTES_TYPE:
                await upload.take(_required(path), body)
            else:
                raise errors.InvalidRequest(f"files are sent as {MULTIPART_TYPE} or as {BYTES_TYPE}, not as {kind!r}")
        return json_reply(upload.written)

    async def _body(self, request: Request) -> AsyncGenerator[bytes, None]:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise errors.InvalidRequest(f"the Content-Encoding {encoding!r} is not understood here: use gzip, or none")
        async with contextlib.aclosing(body_chunks(request, self._max_bytes)) as sent:
            async for chunk in gunzipped(sent, self._max_bytes) if encoding == "gzip" else sent:
                yield chunk


# -- reading


async def _opened(sandbox: Sandbox, path: str, user: User) -> OpenFile:
    try:
        return await sandbox.files.open(path, user=wire.rights(user))
    except (errors.FileNotFound, errors.NotADirectory):
        raise errors.FileNotFound(f"path '{path}' does not exist") from None
    except errors.IsADirectory:
        raise errors.IsADirectory(f"path '{path}' is a directory: list it, or read the files in it") from None


def _answer(file: OpenFile, path: str, request: Request, encoding: str, sandbox: Sandbox) -> Response:
    headers = _headers(file, path)
    if encoding == "gzip":
        headers["content-encoding"] = "gzip"
        return Stream(_packed(file), headers=headers, until=sandbox.wait_ended)
    headers["accept-ranges"] = "bytes"
    span = Span(0, file.size_bytes, file.size_bytes)
    status = 200
    try:
        asked = asked_span(_range(request, headers["last-modified"]), file.size_bytes)
    except Unsatisfiable:
        file.close()
        response = error_reply(416, f"the range lies behind the end of the file, which has {file.size_bytes} bytes")
        response.headers["content-range"] = f"bytes */{file.size_bytes}"
        return response
    if asked is not None:
        span, status = asked, 206
        headers["content-range"] = span.content_range
    headers["content-length"] = str(span.end - span.start)
    return Stream(_part(file, span), status_code=status, headers=headers, until=sandbox.wait_ended)


def _headers(file: OpenFile, path: str) -> dict[str, str]:
    name = posixpath.basename(path)
    return {
        "content-type": mimetypes.guess_type(name)[0] or BYTES_TYPE,
        "content-disposition": disposition(name),
        "last-modified": last_modified(file.modified_at),
        "vary": "Accept-Encoding",
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }


def _range(request: Request, modified: str) -> str | None:
    """Whoever has a part of an older file wants all of the newer one."""
    condition = request.headers.get("if-range")
    return request.headers.get("range") if condition in (None, modified) else None


async def _part(file: OpenFile, span: Span) -> AsyncGenerator[bytes, None]:
    left = span.end - span.start
    async with file, contextlib.aclosing(file.chunks(span.start, span.end)) as chunks:
        async for chunk in chunks:
            left -= len(chunk)
            yield chunk
    if left:
        raise Dropped  # a program cut the file meanwhile, and its old length is promised already


async def _packed(file: OpenFile) -> AsyncGenerator[bytes, None]:
    async with file, contextlib.aclosing(file.chunks()) as chunks:
        async for packed in gzipped(chunks):
            yield packed


# -- writing


class Upload:
    """The files of one request. `written` is what the client is told of them."""

    def __init__(self, sandbox: Sandbox, user: User, metadata: dict[str, str]):
        self.written: list[dict[str, Any]] = []
        self._files = sandbox.files
        self._user = user
        self._attributes = FileAttributes(space=wire.ATTRIBUTE_SPACE, values=metadata)
        self._paths: set[str] = set()

    async def take_form(self, body: AsyncIterator[bytes], boundary: bytes, path: str | None) -> None:
        """A file for each field; a path in the query says where, else the file's own name."""
        async with contextlib.aclosing(parts(body, boundary)) as fields:
            async for field in fields:
                if field.name == _FIELD:
                    await self.take(path or _required(field.filename), field.chunks)

    async def take(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        target = wire.absolute(path, self._user)
        if target in self._paths:
            raise errors.InvalidRequest(f"you cannot upload multiple files to the same path '{target}' in one request")
        self._paths.add(target)
        info = await self._files.write(
            target,
            await small_or_streamed(chunks),
            user=wire.rights(self._user),
            owner=self._user,
            attributes=self._attributes,
            in_place=True,  # clients expect that a watch sees the file made, then changed: not another one in its place
        )
        # The name is the one that was asked for, also where a symlink led elsewhere.
        self.written.append({**wire.write_info(info), "path": target, "name": posixpath.basename(target)})


async def small_or_streamed(chunks: AsyncIterator[bytes]) -> Content:
    """What fits into one message to the sandbox is sent as one."""
    first, size = [], 0
    async for chunk in chunks:
        first.append(chunk)
        size += len(chunk)
        if size > INLINE_BYTES:
            return _following(first, chunks)
    return b"".join(first)


async def _following(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    while first:
        yield first.pop(0)
    async for chunk in rest:
        yield chunk


def _required(path: str | None) -> str:
    if not path:
        raise errors.InvalidRequest("say where the file goes: with `path` in the query, or as the name of the file")
    return path


# `POST /files/compose`: a file made of others, which were uploaded one by one; they are gone then.

MAX_SOURCES = 10_000


class Composition(msgspec.Struct):
    source_paths: list[str]
    destination: str
    username: str | None = None


def decoded(body: bytes) -> Composition:
    """Raises InvalidRequest."""
    try:
        asked = msgspec.json.decode(body, type=Composition)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"invalid request body: {error}") from None
    if not 0 < len(asked.source_paths) <= MAX_SOURCES:
        raise errors.InvalidRequest(f"source_paths must not be empty, nor more than {MAX_SOURCES}")
    if not asked.destination:
        raise errors.InvalidRequest("destination is required")
    return asked


async def compose(request: Request) -> Response:
    asked = decoded(await whole_body(request, 64 * MIB))
    user = wire.user_named(asked.username, wire.default_user(request))
    files = request.scope["state"]["resident"].sandbox.files
    target = wire.absolute(asked.destination, user)
    sources = [wire.absolute(path, user) for path in asked.source_paths]
    if target in sources:
        raise errors.InvalidRequest("a source cannot be the same as the destination")
    info = await files.write(target, _joined(files, sources, user), user=wire.rights(user), owner=user)
    for source in sources:
        with contextlib.suppress(errors.FileNotFound):  # named twice
            await files.remove(source, user=wire.rights(user))
    return json_reply(wire.write_info(info))


async def _joined(files: Files, sources: list[str], user: User) -> AsyncGenerator[bytes, None]:
    for source in sources:
        async with contextlib.aclosing(await files.open_read(source, user=wire.rights(user))) as chunks:
            async for chunk in chunks:
                yield chunk


def routes(residents: Residents, config: Config) -> list[BaseRoute]:
    plane, services, files = Envd(), Services(), FilesHttp(config.server.upload_bytes)

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, Edge(plane, handler), methods=[method])

    return [
        route("/health", "GET", plane.health),
        route("/envs", "GET", plane.envs),
        route("/metrics", "GET", plane.metrics),
        route("/files", "GET", files.read),
        route("/files", "POST", files.write),
        route("/files/compose", "POST", compose),
        *filesystem.routes(services),
        *process.routes(services),
    ]


class Envd:
    """The HTTP endpoints that are not about files, and the errors of all of them."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, AWAY):
            return away_reply(error, request)
        return error_reply(status_of(error), str(error))

    async def health(self, request: Request) -> Response:
        return Response(status_code=204)

    async def envs(self, request: Request) -> Response:
        return json_reply(_resident(request).sandbox.spec.env)

    async def metrics(self, request: Request) -> Response:
        sandbox = _resident(request).sandbox
        sample, limits = await sandbox.meter.latest(), sandbox.limits
        return json_reply(
            {
                "ts": int(sample.at),
                "cpu_count": max(round(limits.cpus), 1),
                "cpu_used_pct": round(sample.cpu_percent, 2),
                "mem_total": limits.memory_bytes,
                "mem_used": sample.memory_bytes,
                "mem_cache": sample.cache_bytes,
                "mem_total_mib": limits.memory_bytes // MIB,
                "mem_used_mib": sample.memory_bytes // MIB,
                "disk_used": sample.space_bytes,
                "disk_total": limits.space_bytes,
            }
        )


class Services:
    """The Connect services' errors."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return connect.render_error(error, request)


def _resident(request: Request) -> Resident:
    resident: Resident = request.scope["state"]["resident"]
    return resident
