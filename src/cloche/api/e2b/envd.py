"""envd (port 49983): its HTTP endpoints and its two Connect services. Tokens are checked before."""

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
from cloche.api.dialect import InvalidJson, decode_json, dialect_route, json_reply
from cloche.api.e2b import connect, filesystem, process
from cloche.api.e2b import envd_schema as wire
from cloche.api.e2b.context import SANDBOX_AWAY_ERRORS, e2b_sandbox_of, error_reply, sandbox_away_reply
from cloche.api.e2b.registry import E2bSandboxes
from cloche.api.encoding import (
    RangeNotSatisfiable,
    RequestedRange,
    choose_content_encoding,
    compress_gzip,
    decompress_gzip,
    format_last_modified,
    inline_content_disposition,
    parse_range_header,
)
from cloche.api.http import (
    DropConnection,
    Handler,
    StreamResponse,
    read_body_chunks,
    read_decoded,
    status_of,
)
from cloche.api.multipart import MULTIPART_TYPE, iterate_form_parts, parse_form_boundary
from cloche.config import Config
from cloche.engine.sandboxes.files import INLINE_BYTES, OpenFile, SandboxFiles
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.file_content import Content
from cloche.model import MIB, FileAttributes, User

# envd's files over HTTP: `GET /files` and `POST /files`. Contents are streamed in both directions.

BYTES_TYPE = "application/octet-stream"
_FILE_FIELD = "file"  # the field of a form that holds a file; others are ignored


class EnvdFiles:
    """`max_bytes` is the largest upload, after decompression."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes

    async def read(self, request: Request) -> Response:
        user = wire.user_from_query(request)
        path = wire.resolve_user_path(request.query_params.get("path", ""), user)
        encoding = choose_content_encoding(request.headers.get("accept-encoding", ""))
        if encoding is None:
            return error_reply(406, "this can be had as it is (identity) and as gzip, and neither is accepted")
        sandbox = e2b_sandbox_of(request).sandbox
        file = await _open_requested_file(sandbox, path, user)
        try:
            return _file_response(file, path, request, encoding, sandbox)
        except BaseException:
            file.close()
            raise

    async def write(self, request: Request) -> Response:
        user = wire.user_from_query(request)
        upload = EnvdUpload(e2b_sandbox_of(request).sandbox, user, wire.metadata_from_headers(request.headers))
        path = request.query_params.get("path")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        async with contextlib.aclosing(self._read_upload_body(request)) as body:
            if kind == MULTIPART_TYPE:
                await upload.take_form(body, parse_form_boundary(request.headers["content-type"]), path)
            elif kind == BYTES_TYPE:
                await upload.take(_require_path(path), body)
            else:
                raise errors.InvalidRequest(f"files are sent as {MULTIPART_TYPE} or as {BYTES_TYPE}, not as {kind!r}")
        return json_reply(upload.written)

    async def _read_upload_body(self, request: Request) -> AsyncGenerator[bytes, None]:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise errors.InvalidRequest(f"the Content-Encoding {encoding!r} is not understood here: use gzip, or none")
        async with contextlib.aclosing(read_body_chunks(request, self._max_bytes)) as sent:
            async for chunk in decompress_gzip(sent, self._max_bytes) if encoding == "gzip" else sent:
                yield chunk


# -- reading


async def _open_requested_file(sandbox: Sandbox, path: str, user: User) -> OpenFile:
    try:
        return await sandbox.files.open(path, user=wire.file_access_user(user))
    except (errors.FileNotFound, errors.NotADirectory):
        raise errors.FileNotFound(f"path '{path}' does not exist") from None
    except errors.IsADirectory:
        raise errors.IsADirectory(f"path '{path}' is a directory: list it, or read the files in it") from None


def _file_response(file: OpenFile, path: str, request: Request, encoding: str, sandbox: Sandbox) -> Response:
    headers = _file_headers(file, path)
    if encoding == "gzip":
        headers["content-encoding"] = "gzip"
        return StreamResponse(_stream_gzipped_file(file), headers=headers, until=sandbox.wait_ended)
    headers["accept-ranges"] = "bytes"
    span = RequestedRange(0, file.size_bytes, file.size_bytes)
    status = 200
    try:
        asked = parse_range_header(_applicable_range_header(request, headers["last-modified"]), file.size_bytes)
    except RangeNotSatisfiable:
        file.close()
        response = error_reply(416, f"the range lies behind the end of the file, which has {file.size_bytes} bytes")
        response.headers["content-range"] = f"bytes */{file.size_bytes}"
        return response
    if asked is not None:
        span, status = asked, 206
        headers["content-range"] = span.content_range
    headers["content-length"] = str(span.end - span.start)
    return StreamResponse(_stream_file_range(file, span), status_code=status, headers=headers, until=sandbox.wait_ended)


def _file_headers(file: OpenFile, path: str) -> dict[str, str]:
    name = posixpath.basename(path)
    return {
        "content-type": mimetypes.guess_type(name)[0] or BYTES_TYPE,
        "content-disposition": inline_content_disposition(name),
        "last-modified": format_last_modified(file.modified_at),
        "vary": "Accept-Encoding",
        # A file is a stranger's: no page of it may act in the name of the server that it comes from.
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
    }


def _applicable_range_header(request: Request, modified: str) -> str | None:
    """The Range header, if `If-Range` allows it: with a part of an older file, a client needs the whole new."""
    condition = request.headers.get("if-range")
    return request.headers.get("range") if condition in (None, modified) else None


async def _stream_file_range(file: OpenFile, span: RequestedRange) -> AsyncGenerator[bytes, None]:
    left = span.end - span.start
    async with file, contextlib.aclosing(file.chunks(span.start, span.end)) as chunks:
        async for chunk in chunks:
            left -= len(chunk)
            yield chunk
    if left:
        raise DropConnection  # a program cut the file meanwhile, and its old length is promised already


async def _stream_gzipped_file(file: OpenFile) -> AsyncGenerator[bytes, None]:
    async with file, contextlib.aclosing(file.chunks()) as chunks:
        async for packed in compress_gzip(chunks):
            yield packed


# -- writing


class EnvdUpload:
    """The files of one request. `written` is the response about them."""

    def __init__(self, sandbox: Sandbox, user: User, metadata: dict[str, str]):
        self.written: list[dict[str, Any]] = []
        self._files = sandbox.files
        self._user = user
        self._attributes = FileAttributes(space=wire.ATTRIBUTE_SPACE, values=metadata)
        self._paths: set[str] = set()

    async def take_form(self, body: AsyncIterator[bytes], boundary: bytes, path: str | None) -> None:
        """Stores a file for each field, at the query's path, else at the file's own name."""
        async with contextlib.aclosing(iterate_form_parts(body, boundary)) as fields:
            async for field in fields:
                if field.name == _FILE_FIELD:
                    await self.take(path or _require_path(field.filename), field.chunks)

    async def take(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        target = wire.resolve_user_path(path, self._user)
        if target in self._paths:
            raise errors.InvalidRequest(f"you cannot upload multiple files to the same path '{target}' in one request")
        self._paths.add(target)
        info = await self._files.write(
            target,
            await buffer_small_content(chunks),
            user=wire.file_access_user(self._user),
            owner=self._user,
            attributes=self._attributes,
            in_place=True,  # clients expect that a watch sees the file made, then changed: not another one in its place
        )
        # The name is the requested one, also where a symlink led elsewhere.
        self.written.append({**wire.encode_write_info(info), "path": target, "name": posixpath.basename(target)})


async def buffer_small_content(chunks: AsyncIterator[bytes]) -> Content:
    """Content that fits into one message to the sandbox as bytes, larger content as a stream."""
    first, size = [], 0
    async for chunk in chunks:
        first.append(chunk)
        size += len(chunk)
        if size > INLINE_BYTES:
            return _chain_chunks(first, chunks)
    return b"".join(first)


async def _chain_chunks(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    while first:
        yield first.pop(0)
    async for chunk in rest:
        yield chunk


def _require_path(path: str | None) -> str:
    if not path:
        raise errors.InvalidRequest("say where the file goes: with `path` in the query, or as the name of the file")
    return path


# `POST /files/compose`: joins files that were uploaded separately, and removes them.

MAX_SOURCES = 10_000


class ComposeFileBody(msgspec.Struct):
    source_paths: list[str]
    destination: str
    username: str | None = None


def decode_compose_request(body: bytes) -> ComposeFileBody:
    """Raises InvalidRequest."""
    try:
        message = decode_json(body, ComposeFileBody)
    except InvalidJson as error:
        raise errors.InvalidRequest(f"invalid request body: {error.detail}") from None
    if not 0 < len(message.source_paths) <= MAX_SOURCES:
        raise errors.InvalidRequest(f"source_paths must not be empty, nor more than {MAX_SOURCES}")
    if not message.destination:
        raise errors.InvalidRequest("destination is required")
    return message


async def compose_file(request: Request) -> Response:
    message = await read_decoded(request, decode_compose_request)
    user = wire.parse_user_name(message.username, wire.default_user_of(request))
    files = e2b_sandbox_of(request).sandbox.files
    target = wire.resolve_user_path(message.destination, user)
    sources = [wire.resolve_user_path(path, user) for path in message.source_paths]
    if target in sources:
        raise errors.InvalidRequest("a source cannot be the same as the destination")
    info = await files.write(
        target, _join_file_contents(files, sources, user), user=wire.file_access_user(user), owner=user
    )
    for source in sources:
        with contextlib.suppress(errors.FileNotFound):  # named twice
            await files.remove(source, user=wire.file_access_user(user))
    return json_reply(wire.encode_write_info(info))


async def _join_file_contents(files: SandboxFiles, sources: list[str], user: User) -> AsyncGenerator[bytes, None]:
    for source in sources:
        async with contextlib.aclosing(await files.open_read(source, user=wire.file_access_user(user))) as chunks:
            async for chunk in chunks:
                yield chunk


def envd_routes(registry: E2bSandboxes, config: Config) -> list[BaseRoute]:
    plane, services, files = Envd(), ConnectErrors(), EnvdFiles(config.server.upload_bytes)

    def route(path: str, method: str, handler: Handler) -> Route:
        return dialect_route(plane, method, path, handler)

    return [
        route("/health", "GET", plane.health),
        route("/envs", "GET", plane.envs),
        route("/metrics", "GET", plane.metrics),
        route("/files", "GET", files.read),
        route("/files", "POST", files.write),
        route("/files/compose", "POST", compose_file),
        *filesystem.filesystem_routes(services),
        *process.process_routes(services),
    ]


class Envd:
    """The HTTP endpoints that are not about files, and the errors of all of them."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, SANDBOX_AWAY_ERRORS):
            return sandbox_away_reply(error, request)
        return error_reply(status_of(error), str(error))

    async def health(self, request: Request) -> Response:
        return Response(status_code=204)

    async def envs(self, request: Request) -> Response:
        return json_reply(e2b_sandbox_of(request).sandbox.spec.env)

    async def metrics(self, request: Request) -> Response:
        sandbox = e2b_sandbox_of(request).sandbox
        sample, limits = await sandbox.meter.latest_sample(), sandbox.limits
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


class ConnectErrors:
    """The Connect services' errors."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return connect.render_connect_error(error, request)
