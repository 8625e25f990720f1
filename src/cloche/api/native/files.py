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
        asked = decode_request_query(request, requests.ReadQuery)
        open_file = sandbox.files.open_whole if asked.whole else sandbox.files.open
        file = await open_file(asked.path, user=_requested_user(asked))
        if file.inline_content is not None:
            return Response(file.inline_content, headers=FILE_HEADERS, media_type=BYTES_TYPE)
        # The client holds all of it in memory; the server must not, or a few clients that do not read would use it up.
        end = file.size_bytes if asked.whole else None
        return StreamResponse(
            file.until_read(end), headers=FILE_HEADERS, media_type=BYTES_TYPE, until=sandbox.wait_ended
        )

    async def write(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = decode_request_query(request, requests.WriteQuery)
        chunks = read_body_chunks(request, self._api.config.server.upload_bytes)
        return json_reply(
            await files.write(asked.path, chunks, user=_requested_user(asked), mode=parse_octal_mode(asked.mode))
        )

    async def list(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = decode_request_query(request, requests.ListQuery)
        return json_reply(await files.list(asked.path, depth=asked.depth, user=_requested_user(asked)))

    async def stat(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = decode_request_query(request, requests.PathQuery)
        return json_reply(await files.stat(asked.path, user=_requested_user(asked)))

    async def exists(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = decode_request_query(request, requests.PathQuery)
        return json_reply(responses.ExistsResponse(exists=await files.exists(asked.path, user=_requested_user(asked))))

    async def make_dir(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = await decode_request_body(request, requests.FilePathRequest)
        return json_reply(
            responses.CreatedResponse(created=await files.make_dir(asked.path, user=_requested_user(asked)))
        )

    async def move(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = await decode_request_body(request, requests.MovePathRequest)
        return json_reply(await files.move(asked.path, asked.to, user=_requested_user(asked)))

    async def remove(self, request: Request) -> Response:
        files = (await self._api.sandbox(request)).files
        asked = await decode_request_body(request, requests.FilePathRequest)
        await files.remove(asked.path, user=_requested_user(asked))
        return Response(status_code=204)

    async def watch(self, request: Request) -> StreamResponse:
        files = (await self._api.sandbox(request)).files
        asked = decode_request_query(request, requests.WatchQuery)
        watch = files.watch(asked.path, recursive=asked.recursive, user=_requested_user(asked))
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
