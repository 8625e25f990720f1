"""A sandbox's files."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import Stream, body_chunks
from cloche.api.native.context import Door, body_of, query_of, reply
from cloche.api.native.runs import event_stream
from cloche.engine.sandboxes.files import Watch
from cloche.events import Event
from cloche.protocol import requests, responses

BYTES = "application/octet-stream"


class Files:
    def __init__(self, door: Door):
        self._door = door

    async def read(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        asked = query_of(request, requests.ReadQuery)
        open_file = sandbox.files.open_whole if asked.whole else sandbox.files.open
        file = await open_file(asked.path, user=_user(asked))
        if file.small is not None:
            return Response(file.small, media_type=BYTES)
        # The caller will have all of it in memory; the server never has, or a few who do not read would use up its own.
        end = file.size_bytes if asked.whole else None
        return Stream(file.until_read(end), media_type=BYTES, until=sandbox.wait_ended)

    async def write(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = query_of(request, requests.WriteQuery)
        chunks = body_chunks(request, self._door.config.server.upload_bytes)
        return reply(await files.write(asked.path, chunks, user=_user(asked), mode=mode_of(asked.mode)))

    async def list(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = query_of(request, requests.ListQuery)
        return reply(await files.list(asked.path, depth=asked.depth, user=_user(asked)))

    async def stat(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = query_of(request, requests.PathQuery)
        return reply(await files.stat(asked.path, user=_user(asked)))

    async def exists(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = query_of(request, requests.PathQuery)
        return reply(responses.Exists(exists=await files.exists(asked.path, user=_user(asked))))

    async def make_dir(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = await body_of(request, requests.Path)
        return reply(responses.Made(created=await files.make_dir(asked.path, user=_user(asked))))

    async def move(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = await body_of(request, requests.MovePath)
        return reply(await files.move(asked.path, asked.to, user=_user(asked)))

    async def remove(self, request: Request) -> Response:
        files = (await self._door.sandbox(request)).files
        asked = await body_of(request, requests.Path)
        await files.remove(asked.path, user=_user(asked))
        return Response(status_code=204)

    async def watch(self, request: Request) -> Stream:
        files = (await self._door.sandbox(request)).files
        asked = query_of(request, requests.WatchQuery)
        watch = files.watch(asked.path, recursive=asked.recursive, user=_user(asked))
        return event_stream(request, _changes(watch))


def _user(asked: Any) -> Any:
    """The engine says which users there are."""
    return asked.user


def mode_of(text: str | None) -> int | None:
    """Permissions as people write them, in octal. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return int(text, 8)
    except ValueError:
        raise errors.InvalidRequest(f"mode must be octal, such as 644, not {text!r}") from None


async def _changes(watch: Watch) -> AsyncGenerator[Event, None]:
    async with watch:
        yield responses.Watching()
        async for change in watch:
            yield responses.Change(kind=change.kind, path=change.path)
