"""Files of a sandbox: read, write, list, stat, move, remove and watch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import StreamResponse, read_body_chunks
from cloche.api.native.context import NativeContext, decode_request_body, decode_request_query
from cloche.api.native.runs import event_stream_response
from cloche.engine.sandboxes.files import DirectoryWatch
from cloche.events import Event
from cloche.protocol import requests, responses

BYTES_TYPE = "application/octet-stream"
FILE_HEADERS = {
    # A file is a stranger's: no page of it may act in the name of the server that it comes from, or embed it.
    "content-security-policy": "sandbox",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "private, no-store",
}


class NativeFiles:
    def __init__(self, api: NativeContext):
        self._api = api

    async def read(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        query = decode_request_query(request, requests.ReadQuery)
        open_file = sandbox.files.open_whole if query.whole else sandbox.files.open
        file = await open_file(query.path, user=_requested_user(query))
        if file.inline_content is not None:
            return Response(file.inline_content, headers=FILE_HEADERS, media_type=BYTES_TYPE)
        # The client holds all of it in memory; the server must not, or a few clients that do not read would use it up.
        end = file.size_bytes if query.whole else None
        return StreamResponse(
            file.until_read(end), headers=FILE_HEADERS, media_type=BYTES_TYPE, until=sandbox.wait_ended
        )

    async def write(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        query = decode_request_query(request, requests.WriteQuery)
        chunks = read_body_chunks(request, self._api.config.server.upload_bytes)
        return json_reply(
            await files.write(query.path, chunks, user=_requested_user(query), mode=parse_octal_mode(query.mode))
        )

    async def list(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        query = decode_request_query(request, requests.ListQuery)
        return json_reply(await files.list(query.path, depth=query.depth, user=_requested_user(query)))

    async def stat(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        query = decode_request_query(request, requests.PathQuery)
        return json_reply(await files.stat(query.path, user=_requested_user(query)))

    async def exists(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        query = decode_request_query(request, requests.PathQuery)
        return json_reply(responses.ExistsResponse(exists=await files.exists(query.path, user=_requested_user(query))))

    async def make_dir(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        message = await decode_request_body(request, requests.FilePathRequest)
        return json_reply(
            responses.CreatedResponse(created=await files.make_dir(message.path, user=_requested_user(message)))
        )

    async def move(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        message = await decode_request_body(request, requests.MovePathRequest)
        return json_reply(await files.move(message.path, message.to, user=_requested_user(message)))

    async def remove(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        message = await decode_request_body(request, requests.FilePathRequest)
        await files.remove(message.path, user=_requested_user(message))
        return Response(status_code=204)

    async def watch(self, request: Request) -> StreamResponse:
        files = (await self._api.sandbox(request)).files
        query = decode_request_query(request, requests.WatchQuery)
        watch = files.watch(query.path, recursive=query.recursive, user=_requested_user(query))
        return event_stream_response(request, _stream_watch_events(watch))


def _requested_user(asked: Any) -> Any:
    """The requested user. The engine validates it."""
    return asked.user


def parse_octal_mode(text: str | None) -> int | None:
    """Permissions from their octal text. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return int(text, 8)
    except ValueError:
        raise errors.InvalidRequest(f"mode must be octal, such as 644, not {text!r}") from None


async def _stream_watch_events(watch: DirectoryWatch) -> AsyncGenerator[Event, None]:
    async with watch:
        yield responses.WatchingMessage()
        async for change in watch:
            yield responses.ChangeMessage(kind=change.kind, path=change.path)
